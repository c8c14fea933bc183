"""What a process shows to scrapers and probes: `/metrics`, `/healthz`, `/readyz`.

A command opens its monitor first, before it joins a swarm or compiles, so that a taken port is told at once and probes
are answered from the beginning; then it tells the monitor what there is to show. Without a port nothing listens and
nothing is imported.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from importlib import metadata
from types import MappingProxyType

import trio

from dmoe_jax.metrics.families import Family, labelled
from net.identity import Address

Source = Callable[[], Iterable[Family]]
"""Makes families of what is counted now; called on the event loop, at every scrape."""


class Monitor:
    """What a process shows of itself. Made by `open_monitor`."""

    def __init__(self, command: str) -> None:
        self.address: Address | None = None
        """Where it is shown; None: nowhere."""
        self.why_not_ready: Callable[[], str] = lambda: "starting"
        """Called by `/readyz`: why this process does not do its work yet, in a few words; empty: it does."""
        try:
            version = metadata.version("dmoe_jax")
        except metadata.PackageNotFoundError:  # run from its sources
            version = ""
        about = {"command": command, "version": version}
        self._about = labelled("gauge", "dmoe_build_info", "1; which command of which version this is.", [(about, 1)])
        self._sources: list[Source] = []

    def show(self, source: Source) -> None:
        """Show these families, too, from now on."""
        self._sources.append(source)

    def families(self) -> list[Family]:
        """Everything there is to show now."""
        return [self._about, *(family for source in self._sources for family in source())]


@asynccontextmanager
async def open_monitor(
    address: Address | None, *, command: str, more: Mapping[str, Callable[[], bytes]] = MappingProxyType({})
) -> AsyncIterator[Monitor]:
    """A monitor that is served while the block runs.

    Args:
      address: where, port 0 for one that the system chooses; None: nowhere.
      command: what this process is, as a label.
      more: further pages, by path; they are JSON.

    Raises:
      ListenFailed: the port is taken, or the address is not this machine's.
    """
    monitor = Monitor(command)
    if address is None:
        yield monitor
        return
    from dmoe_jax.metrics.exposition import CONTENT_TYPE, as_text, of_process, snapshot
    from dmoe_jax.metrics.http import Answer, Page, open_http_server

    async def metrics() -> Answer:
        shown = snapshot(monitor.families())
        # Writing takes a microsecond a line or more; a node of many experts has thousands of lines.
        body = await trio.to_thread.run_sync(lambda: as_text([*shown, *of_process()]))
        return Answer(body=body, content_type=CONTENT_TYPE)

    async def healthz() -> Answer:
        await trio.lowlevel.checkpoint()  # whoever reads this knows that the loop runs
        return Answer(body=b"ok\n")

    async def readyz() -> Answer:
        why_not = monitor.why_not_ready()
        return Answer(body=f"{why_not}\n".encode(), status=503) if why_not else Answer(body=b"ready\n")

    def page_of(make: Callable[[], bytes]) -> Page:
        async def page() -> Answer:
            return Answer(body=make(), content_type="application/json")

        return page

    pages: dict[str, Page] = {"/metrics": metrics, "/healthz": healthz, "/readyz": readyz}
    pages |= {path: page_of(make) for path, make in more.items()}
    async with open_http_server(address, pages) as monitor.address:
        yield monitor
