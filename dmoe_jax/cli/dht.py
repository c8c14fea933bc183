"""`dmoe dht`: a peer that keeps records and lets others in."""

import errno
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar

import trio
import tyro

from dmoe_jax.cli.lifecycle import Stop, run_until_done
from dmoe_jax.cli.network import (
    EndsWithInput,
    JoinTexts,
    ListenOptions,
    MetricsOptions,
    NetworkOptions,
    join_line,
    join_swarm,
)
from dmoe_jax.cli.sources import ConfigFile
from dmoe_jax.metrics.process import peer_families
from dmoe_jax.runs.endings import EXIT_INTERRUPTED, CommandFailed
from dmoe_jax.runs.speech import say, why_unheard


@dataclass(frozen=True, kw_only=True)
class DhtCommand:
    """Run a DHT peer: the meeting point of a swarm. Nodes and trainers join through it or through each other."""

    join: JoinTexts = ()
    """Peers to join through: HOST:PORT, PEERID@HOST:PORT to make sure who is there, or file:PATH, which lists some.
    None starts a new swarm."""
    listen: Annotated[ListenOptions, tyro.conf.arg(name="")] = field(default_factory=ListenOptions)
    network: Annotated[NetworkOptions, tyro.conf.arg(name="")] = field(default_factory=NetworkOptions)
    metrics: Annotated[MetricsOptions, tyro.conf.arg(name="")] = field(default_factory=MetricsOptions)
    LEAVE_TIMEOUT_S: ClassVar[float] = 5.0
    """Seconds within which the process ends in order once it is stopped; then it ends anyhow."""
    config: ConfigFile = None
    exit_on_stdin_eof: EndsWithInput = False

    def run(self) -> int:
        return run_until_done(
            self._serve, exit_on_stdin_eof=self.exit_on_stdin_eof, leave_timeout_s=self.LEAVE_TIMEOUT_S
        )

    async def _serve(self, stop: Stop) -> int:
        async with (
            self.metrics.opened("dht") as monitor,
            join_swarm(self.network, join=self.join, listen=self.listen) as peer,
        ):
            monitor.show(partial(peer_families, peer))
            monitor.why_not_ready = lambda: ""
            say(f"DHT peer {peer.rpc.peer_id.short} listens on {peer.rpc.address}")
            if not say(join_line("node", self.network, peer)) and not self.join:
                error = why_unheard()
                # A reader that has gone may have read the line; on a full disk it stands nowhere.
                if error is not None and error.errno == errno.ENOSPC:
                    raise CommandFailed(f"nobody can join: standard output cannot be written: {error.strerror}")
            with stop.body():
                await trio.sleep_forever()
        return EXIT_INTERRUPTED
