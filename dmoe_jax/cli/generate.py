"""`dmoe generate`: text out of a trained model."""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from dmoe_jax.cli.checks import check_at_least, text_of
from dmoe_jax.cli.lifecycle import Stop, run_until_done
from dmoe_jax.cli.sources import ConfigFile
from dmoe_jax.cli.trained_options import TrainedModelOptions
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.speech import say, shown, why_unheard
from dmoe_jax.trained.settings import Sampling


@dataclass(frozen=True, kw_only=True)
class GenerateCommand(TrainedModelOptions):
    """Have a trained language model go on with a text, as it is written."""

    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT [TEXT ...]")] = ()
    """Texts to go on with, each by itself, side by side. Default: the model begins one."""
    prompts: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A file with a prompt a line."""
    words: int = 200
    """Words of each continuation."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    config: ConfigFile = None
    json: bool = False
    """Print one JSON object a prompt: the prompt, the text, its words' ids and log-probabilities."""

    def run(self) -> int:
        return run_until_done(self._generate)

    async def _generate(self, stop: Stop) -> int:
        del stop  # cancelled as a whole: what was written stays
        check_at_least(1, self, "words")
        prompts = self._all_prompts()
        streams = len(prompts) == 1 and not self.json
        async with self.opened() as model:
            ids = [model.encode(prompt) for prompt in prompts]
            if streams:
                _write(prompts[0])
            written = await model.generate(
                ids,
                words=self.words,
                **asdict(self.sampling),
                on_piece=lambda prompt, piece: _write(piece) if streams else False,
            )
        if streams:
            say("")
        for prompt, each in zip(prompts, written, strict=True):
            if self.json:
                say(json.dumps({"prompt": prompt, **asdict(each)}))
            elif not streams:
                say(shown(f"{prompt}{each.text}\n"))
        return 0

    def _all_prompts(self) -> list[str]:
        """The prompts of all flags; an empty one if there is none. Raises UsageError if the file cannot be read."""
        if self.prompts is None:
            return list(self.prompt) or [""]
        lines = text_of("--prompts", self.prompts).splitlines()
        if not (found := [*self.prompt, *filter(None, map(str.strip, lines))]):
            raise UsageError(f"--prompts {self.prompts}: the file has no line with a prompt")
        return found


def _write(piece: str) -> bool:
    """Write a piece of text at once; True if nobody reads it any more."""
    sys.stdout.write(shown(piece))
    sys.stdout.flush()
    return why_unheard() is not None
