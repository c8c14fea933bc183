"""`dmoe watch`: a swarm, a run or a recording as a page in the browser."""

import webbrowser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import trio
import tyro

from dmoe_jax.cli.lifecycle import Stop, run_until_done
from dmoe_jax.cli.network import JoinTexts, MemberOptions, join_swarm, not_listening
from dmoe_jax.cli.sources import ConfigFile
from dmoe_jax.live.feeds import Feed, LiveFeed
from dmoe_jax.live.run_feed import open_folder
from dmoe_jax.live.server import serve_page
from dmoe_jax.live.watcher import Watcher
from dmoe_jax.runs.endings import EXIT_INTERRUPTED, UsageError, mistakes_in_one_line
from dmoe_jax.runs.speech import say
from dmoe_net.errors import ListenFailed
from dmoe_net.identity import Address
from dmoe_net.nursery import background_nursery

_PERIOD_S = 2.0
"""Seconds between two looks at a swarm."""
_MOST_LOOKING = 0.25
"""Most of its time that the command looks at a swarm: a large one is looked at less often."""


@dataclass(frozen=True, kw_only=True)
class WatchCommand:
    """Serve a page for the browser that shows a swarm: its peers, the load of each expert, loss, staleness, failures.

    With --join the swarm as it is now; with RUN a run's folder, or a recording of record_swarm, with a slider of time.
    """

    run_folder: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(name="run", metavar="RUN")] = None
    """Folder of a run, also of one that is still running, or of a recording."""
    join: JoinTexts = ()
    """Peers to join through: HOST:PORT, PEERID@HOST:PORT to make sure who is there, or file:PATH, which lists some."""
    network: Annotated[MemberOptions, tyro.conf.arg(name="")] = field(default_factory=MemberOptions)
    port: int = 0
    """Port of the page; 0 lets the system choose one."""
    host: str = "127.0.0.1"
    """Address to serve it at. Whoever reaches it sees it: nothing asks who it is."""
    open: bool = False
    """Open the page in this machine's browser."""
    config: ConfigFile = None

    def run(self) -> int:
        if (self.run_folder is None) == (not self.join):
            raise UsageError("expected either RUN, a folder, or --join PEER, a swarm")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port must be 0 to 65535, got {self.port}")
        if not self.host:
            raise UsageError("--host must not be empty")
        return run_until_done(self._watch)

    async def _watch(self, stop: Stop) -> int:
        async with self._feed() as feed:
            try:
                async with serve_page(Address(self.host, self.port), feed) as address:
                    url = f"http://{address}/"
                    say(f"watch at {url}")
                    with stop.body():
                        if self.open:
                            await trio.to_thread.run_sync(webbrowser.open, url, abandon_on_cancel=True)
                        await trio.sleep_forever()
            except ListenFailed as error:
                raise not_listening("--port", error) from error
        return EXIT_INTERRUPTED

    @asynccontextmanager
    async def _feed(self) -> AsyncIterator[Feed]:
        """The feed of what is to be watched, which is filled while the block runs."""
        async with background_nursery() as nursery:
            if self.run_folder is not None:
                with mistakes_in_one_line():
                    folder = open_folder(self.run_folder)
                nursery.start_soon(folder.run)
                yield folder.timeline
                return
            name, feed = self.network.swarm, LiveFeed(f"swarm {self.network.swarm!r}")
            async with join_swarm(self.network, join=self.join) as peer:
                nursery.start_soon(_look, Watcher(rpc=peer.rpc, dht=peer.dht, swarm=name), feed)
                yield feed


async def _look(watcher: Watcher, feed: LiveFeed) -> None:
    """Show the swarm again and again."""
    while True:
        began = trio.current_time()
        feed.publish(*await watcher.look())
        took_s = trio.current_time() - began
        await trio.sleep(max(_PERIOD_S - took_s, took_s / _MOST_LOOKING - took_s))
