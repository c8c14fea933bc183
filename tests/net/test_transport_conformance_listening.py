"""Transports and listeners keep the promises of `dmoe_net.transport.base`, on every network."""

import os
import re

import pytest
import trio
import trio.testing

from dmoe_net.errors import DialFailed, ListenFailed, PeerUnavailable
from dmoe_net.identity import Address, PeerId
from dmoe_net.transport.base import Link, Listener
from tests.net.each_network import NETWORKS, Ends, Network, drop, on_every_network
from tests.net.link_frames import exchange, numbered

NUM_CONNECTS = 1000


@on_every_network
async def test_a_cancelled_accept_loses_no_link(ends: Ends) -> None:
    """Cancelled while it waits, and cancelled in the moment in which a link is there."""
    listener = await ends.server.listen(ends.any_port)
    for is_early in (True, False):
        links: list[Link] = []
        async with trio.open_nursery() as nursery:

            async def dial(links: list[Link] = links) -> None:
                links.append(await ends.client.dial(listener.address))

            if is_early:
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as inner:
                        inner.start_soon(listener.accept)
                        await ends.settle()
                        scope.cancel()
            nursery.start_soon(dial)
            await ends.settle()
            if not is_early:
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await listener.accept()
                assert scope.cancelled_caught
            accepted = await listener.accept()
            await accepted.handshake()
        await exchange(links[0], accepted, numbered(1, 100))
        drop(links[0], accepted)
    await listener.aclose()


@on_every_network
async def test_nobody_listens(ends: Ends) -> None:
    """A dial to a closed port is DialFailed with the address on one line; so is one to a host that does not exist."""
    listener = await ends.server.listen(ends.any_port)
    await listener.aclose()
    with pytest.raises(DialFailed, match=re.escape(str(listener.address))) as caught:
        await ends.client.dial(listener.address)
    assert "\n" not in str(caught.value)
    with pytest.raises(DialFailed):
        await ends.client.dial(Address("a" * 100, 1))


@on_every_network
async def test_an_address_is_listened_on_once(ends: Ends) -> None:
    """The error names the address; it is free again after closing."""
    listener = await ends.server.listen(ends.any_port)
    assert listener.address.port != 0
    with pytest.raises(ListenFailed, match=re.escape(str(listener.address))):
        await ends.server.listen(listener.address)
    await listener.aclose()
    again = await ends.server.listen(listener.address)
    assert again.address == listener.address
    await again.aclose()


@on_every_network
async def test_addresses_of_others_cannot_be_listened_on(ends: Ends) -> None:
    """A host that is not ours is refused, by name."""
    with pytest.raises(ListenFailed, match=r"203\.0\.113\.1:7"):
        await ends.server.listen(Address("203.0.113.1", 7))


@on_every_network
async def test_a_closed_listener_accepts_nothing_and_its_links_live_on(ends: Ends) -> None:
    """`accept` raises ListenFailed, also one that waits already; links accepted before do not notice."""
    listener = await ends.server.listen(ends.any_port)
    links: list[Link] = []

    async def dial() -> None:
        links.append(await ends.client.dial(listener.address))

    async def accept() -> None:
        with pytest.raises(ListenFailed, match=re.escape(str(listener.address))):
            await listener.accept()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        accepted = await listener.accept()
        await accepted.handshake()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        await ends.settle()
        await listener.aclose()
    await listener.aclose()
    await accept()
    await exchange(links[0], accepted, numbered(1, 10))
    await exchange(accepted, links[0], numbered(2, 10))
    drop(links[0], accepted)


@on_every_network
async def test_both_ends_know_each_other(ends: Ends) -> None:
    """The dialled end has the address dialled, the accepted one the host it comes from; ids as the network proves."""
    listener = await ends.server.listen(ends.any_port)
    links: list[Link] = []
    async with trio.open_nursery() as nursery:

        async def dial() -> None:
            links.append(await ends.client.dial(listener.address))

        nursery.start_soon(dial)
        accepted = await listener.accept()
        assert accepted.remote_peer_id is None
        await accepted.handshake()
    await links[0].handshake()
    assert links[0].remote_address == listener.address
    assert accepted.remote_address.host == ends.client_host
    assert accepted.remote_address.port != listener.address.port
    assert links[0].remote_peer_id == ends.server.peer_id
    assert accepted.remote_peer_id == ends.client.peer_id
    drop(links[0], accepted)
    await listener.aclose()


@on_every_network
async def test_somebody_else_answers(ends: Ends) -> None:
    """On a network that proves identities, a dial for another peer fails and names both."""
    if ends.server.peer_id is None:
        return
    wanted = PeerId(b"w" * 32)
    listener = await ends.server.listen(ends.any_port)
    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            link = await listener.accept()
            try:
                await link.handshake()
                assert await link.receive() is None
            except PeerUnavailable:
                pass  # it found out that it was not meant, one way or the other
            link.abort()

        nursery.start_soon(serve)
        with pytest.raises(DialFailed) as caught:
            await ends.client.dial(listener.address, peer_id=wanted)
    assert str(wanted) in str(caught.value)
    assert str(ends.server.peer_id) in str(caught.value)
    await listener.aclose()


@on_every_network
async def test_a_cancelled_dial_is_no_link(ends: Ends) -> None:
    """Neither end keeps anything of it; the listener goes on."""
    listener = await ends.server.listen(ends.any_port)
    with trio.CancelScope() as scope:
        scope.cancel()
        await ends.client.dial(listener.address)
    assert scope.cancelled_caught
    await listener.aclose()


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_connecting_and_dropping_leaves_nothing_open(network: Network) -> None:
    """Closed or aborted, by the one end or by the other: no descriptor and no task stays behind."""

    async def main() -> None:
        async with network.open() as ends:
            listener = await ends.server.listen(ends.any_port)
            await connect_and_drop(ends, listener, 4)  # whatever is made once, is made now
            before = resources()
            await connect_and_drop(ends, listener, NUM_CONNECTS)
            await ends.settle()
            assert resources() == before
            await listener.aclose()

    network.run(main)


async def connect_and_drop(ends: Ends, listener: Listener, count: int) -> None:
    links: list[Link] = []

    async def dial() -> None:
        links.append(await ends.client.dial(listener.address))

    for index in range(count):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial)
            accepted = await listener.accept()
            await accepted.handshake()
        ways = [links.pop(), accepted]
        if index & 1:
            ways.reverse()
        if index & 2:
            ways[0].abort()
        else:
            await ways[0].aclose()
        ways[1].abort()


def resources() -> tuple[int, int]:
    """Open file descriptors and trio tasks."""
    return len(os.listdir("/proc/self/fd")), trio.lowlevel.current_statistics().tasks_living
