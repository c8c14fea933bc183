"""Hosts and links in simulations, for the tests of the simulated network."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from dmoe_net.errors import ConnectionLost
from dmoe_net.identity import Address, PeerId
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.endpoints import SimLink, SimListener
from dmoe_net.transport.sim.events import Partition
from dmoe_net.transport.sim.network import SimNetwork
from dmoe_net.wire.frames import Part, whole_part
from tests.net.link_frames import numbered

CUT = Partition((frozenset({"a"}),))  # a from everybody else


def in_simulation(body: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A synchronous test out of an async one: it runs in virtual time, from 0 s on; a parameter `seed` seeds it."""

    @functools.wraps(body)
    def test(**parameters: Any) -> None:
        run(functools.partial(body, **parameters), seed=parameters.get("seed", 0))

    return test


def peer(host: str) -> PeerId:
    return PeerId(host.encode().ljust(32))


async def listen(network: SimNetwork, host: str) -> SimListener:
    return await network.transport(host, peer(host)).listen(Address(host, 0))


async def connect(network: SimNetwork, source: str, destination: str) -> tuple[SimLink, SimLink]:
    """A link between two hosts: (dialled, accepted)."""
    listener = await listen(network, destination)
    dialled = await network.transport(source, peer(source)).dial(listener.address)
    accepted = await listener.accept()
    await listener.aclose()
    return dialled, accepted


@asynccontextmanager
async def open_link(**options: Any) -> AsyncIterator[tuple[SimNetwork, SimLink, SimLink]]:
    """A network, and a link from host a to host b: dialled, accepted."""
    async with simulate(**options) as network:
        yield network, *await connect(network, "a", "b")


def part(nbytes: int, index: int = 0) -> Part:
    """A part of exactly so many bytes on the wire."""
    without_body = whole_part(numbered(index, 0)).nbytes
    sent = whole_part(numbered(index, nbytes - without_body))
    while sent.nbytes != nbytes:  # the length in the header takes a byte or two itself
        sent = whole_part(numbered(index, sent.frame.tensors[0].nbytes - (sent.nbytes - nbytes)))
    return sent


async def arrival_s(link: SimLink) -> float:
    assert await link.receive() is not None
    return trio.current_time()


@asynccontextmanager
async def expect_duration(seconds: float) -> AsyncIterator[None]:
    start = trio.current_time()
    yield
    assert trio.current_time() - start == pytest.approx(seconds, abs=1e-9)


async def expect_lost(link: SimLink, reason: str) -> None:
    with pytest.raises(ConnectionLost, match=reason):
        await receive_all(link)


async def receive_all(link: SimLink) -> None:
    while await link.receive() is not None:
        pass
