"""Every network there is, to run one test body over all of them.

The real ones run in real time over loopback, the simulated one in virtual time. It is there twice: as it is, and with
`check_frames`, which sends every byte through the parser of the real ones.
"""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest
import trio
import trio.testing

from dmoe_net.identity import Address, PeerId
from dmoe_net.keys import Identity
from dmoe_net.transport.base import Link, Transport
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.transport.tls import TlsTransport


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Two peers of one network, an address where the server may listen, the host at which it sees the client, and a
    function that waits until nothing happens any more."""

    client: Transport
    server: Transport
    any_port: Address
    client_host: str
    settle: Callable[[], Awaitable[None]]

    async def pair(self) -> tuple[Link, Link]:
        """A link: (dialled, accepted)."""
        listener = await self.server.listen(self.any_port)
        links: list[Link] = []
        async with trio.open_nursery() as nursery:

            async def dial() -> None:
                links.append(await self.client.dial(listener.address, peer_id=self.server.peer_id))

            nursery.start_soon(dial)
            accepted = await listener.accept()
            await accepted.handshake()
        await listener.aclose()
        return links[0], accepted


@dataclass(frozen=True, kw_only=True)
class Network:
    name: str
    run: Callable[[Callable[[], Awaitable[None]]], None]
    open: Callable[[], AbstractAsyncContextManager[Ends]]


async def _quiet() -> None:
    await trio.testing.wait_all_tasks_blocked(0.03)


@asynccontextmanager
async def _real(client: Transport, server: Transport) -> AsyncIterator[Ends]:
    loopback = "127.0.0.1"
    yield Ends(client=client, server=server, any_port=Address(loopback, 0), client_host=loopback, settle=_quiet)


TLS_IDENTITIES = Identity.from_seed(b"c" * 32), Identity.from_seed(b"s" * 32)


@asynccontextmanager
async def _sim(check_frames: bool) -> AsyncIterator[Ends]:
    async with simulate(check_frames=check_frames) as network:
        yield Ends(
            client=network.transport("laptop", PeerId(b"c" * 32)),
            server=network.transport("server", PeerId(b"s" * 32)),
            any_port=Address("server", 0),
            client_host="laptop",
            settle=functools.partial(trio.sleep, 10.0),
        )


NETWORKS = [
    Network(name="tcp", run=trio.run, open=lambda: _real(TcpTransport(), TcpTransport())),
    Network(name="tls", run=trio.run, open=lambda: _real(*map(TlsTransport, TLS_IDENTITIES))),
    Network(name="sim", run=run, open=functools.partial(_sim, check_frames=False)),
    Network(name="sim-checked", run=run, open=functools.partial(_sim, check_frames=True)),
]


def on_every_network(body: Callable[[Ends], Awaitable[None]]) -> Callable[[Network], None]:
    """A test for each network out of one body."""

    @pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
    def test(network: Network) -> None:
        async def main() -> None:
            async with network.open() as ends:
                with trio.fail_after(600.0 if network.run is run else 60.0):
                    await body(ends)

        network.run(main)

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


def on_every_link(body: Callable[[Ends, Link, Link], Awaitable[None]]) -> Callable[[Network], None]:
    """A test for each network out of one body that is given the two ends of a link: dialled, accepted."""

    @functools.wraps(body)
    async def test(ends: Ends) -> None:
        dialled, accepted = await ends.pair()
        await body(ends, dialled, accepted)
        drop(dialled, accepted)

    return on_every_network(test)


def drop(*links: Link) -> None:
    for link in links:
        link.abort()
