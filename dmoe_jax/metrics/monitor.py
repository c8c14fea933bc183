"""Pages of a process for scrapers and probes: `/metrics`, `/healthz`, `/readyz`.

A command opens its monitor before it joins a swarm or compiles, so that probes are answered from the beginning, and
then tells it what there is to show.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from types import MappingProxyType

import trio
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from dmoe_jax.metrics.families import Family, labelled
from dmoe_jax.metrics.http_server import Answer, Page, Request, open_http_server
from dmoe_net.identity import Address
from dmoe_net.wire.versions import SOFTWARE

Source = Callable[[], Iterable[Family]]
"""Makes families of what is counted now; called on the event loop, at every scrape."""


class Monitor(Collector):
    """The figures that a process shows. Made by `open_monitor`."""

    def __init__(self, command: str) -> None:
        self.address: Address | None = None
        """Address where they are shown; None: nowhere."""
        self.why_not_ready: Callable[[], str] = lambda: "starting"
        """Called by `/readyz`; says in a few words why this process does not do its work yet; empty: it does."""
        about = {"command": command, "version": SOFTWARE.partition(" ")[2]}
        self._about = labelled("gauge", "dmoe_build_info", "1; which command of which version this is.", [(about, 1)])
        self._sources: list[Source] = []

    def show(self, source: Source) -> None:
        """Show these families, too, from now on."""
        self._sources.append(source)

    def families(self) -> list[Family]:
        """Return everything there is to show now."""
        return [self._about, *(family for source in self._sources for family in source())]

    def collect(self) -> Iterable[Family]:
        """Return the families and the system's figures of this process, to `prometheus_client` in a worker thread."""
        return [*trio.from_thread.run_sync(self.families), *ProcessCollector(registry=None).collect()]


@asynccontextmanager
async def open_monitor(
    address: Address | None, *, command: str, more: Mapping[str, Callable[[], bytes]] = MappingProxyType({})
) -> AsyncIterator[Monitor]:
    """A monitor that is served while the block runs.

    Args:
      address: to listen at, with port 0 for one that the system chooses; None: nothing listens.
      command: name of this process's command, a label.
      more: further pages, by path; they are JSON.

    Raises:
      ListenFailed: the port is taken, or the address is not this machine's.
    """
    monitor = Monitor(command)
    if address is None:
        yield monitor
        return

    async def metrics(request: Request) -> Answer:
        # Writing takes a microsecond a line or more; a node of many experts has thousands of lines.
        body = await trio.to_thread.run_sync(generate_latest, monitor)
        return Answer(body, content_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def healthz(request: Request) -> Answer:
        return Answer(b"ok\n")  # whoever reads this knows that the loop runs

    async def readyz(request: Request) -> Answer:
        why_not = monitor.why_not_ready()
        return Answer(f"{why_not}\n".encode(), HTTPStatus.SERVICE_UNAVAILABLE) if why_not else Answer(b"ready\n")

    async def further(make: Callable[[], bytes], request: Request) -> Answer:
        return Answer(make(), content_type="application/json")

    pages: dict[str, Page] = {"/metrics": metrics, "/healthz": healthz, "/readyz": readyz}
    pages |= {path: partial(further, make) for path, make in more.items()}
    async with open_http_server(address, pages) as monitor.address:
        yield monitor
