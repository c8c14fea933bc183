"""`dmoe serve`: a trained model behind HTTP, in the form of OpenAI's completions."""

from contextlib import AsyncExitStack
from dataclasses import dataclass

import trio

from dmoe_jax.cli.checks import check_at_least
from dmoe_jax.cli.lifecycle import Stop, run_until_done
from dmoe_jax.cli.network import not_listening
from dmoe_jax.cli.sources import ConfigFile
from dmoe_jax.cli.trained_options import TrainedModelOptions
from dmoe_jax.runs.endings import EXIT_INTERRUPTED, UsageError
from dmoe_jax.runs.speech import say
from dmoe_jax.trained.completions import CompletionLimits
from dmoe_net.errors import ListenFailed
from dmoe_net.identity import Address


@dataclass(frozen=True, kw_only=True)
class ServeCommand(TrainedModelOptions):
    """Answer requests for text over HTTP, in the form of OpenAI's completions (POST /v1/completions).

    There is no password: listen on this machine alone, or behind a server that asks for one.
    """

    host: str = "127.0.0.1"
    """Address to listen at."""
    port: int = 8000
    """Port to listen at; 0 for one that the system chooses."""
    at_once: int = 2
    """Requests that are answered at the same time; others wait."""
    most_words: int = 1024
    """Most words of a completion."""
    most_prompts: int = 16
    """Most completions of a request."""
    config: ConfigFile = None

    def run(self) -> int:
        return run_until_done(self._serve)

    async def _serve(self, stop: Stop) -> int:
        check_at_least(1, self, "at_once", "most_words", "most_prompts")
        if not 0 <= self.port <= 65_535:
            raise UsageError(f"--port must be from 0 to 65535, got {self.port}")
        limits = CompletionLimits(most_words=self.most_words, most_prompts=self.most_prompts)
        address = Address(self.host, self.port)
        async with self.opened() as model, AsyncExitStack() as stack:
            from dmoe_jax.trained.completion_server import open_completions

            opening = open_completions(address, model, name=self.model_name, limits=limits, at_once=self.at_once)
            try:
                listening = await stack.enter_async_context(opening)
            except ListenFailed as error:
                raise not_listening("--port", error) from error
            with stop.body():
                say(f"completions at http://{listening}/v1/completions")
                await trio.sleep_forever()
        return EXIT_INTERRUPTED
