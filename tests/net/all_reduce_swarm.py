"""Peers that are a group on the simulated network, for the tests of all-reduce and all-gather."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import trio

from dmoe_net.averaging.grouping.group import Group, Member, Role
from dmoe_net.averaging.reduction.all_reduce import AllReduce, AllReduceResult
from dmoe_net.averaging.reduction.partition import AllReduceConfig, parts_of
from dmoe_net.identity import Address, Contact
from dmoe_net.rpc.base import Body, Caller, Handler, Reply, Request
from dmoe_net.rpc.peer import RpcPeer, open_rpc_peer
from dmoe_net.transport.sim import simulate
from dmoe_net.transport.sim.links import Constant, HostOptions
from dmoe_net.transport.sim.network import SimNetwork
from dmoe_net.types import Array
from dmoe_net.wire.tensors import Outgoing
from tests.net.sim_hosts import peer

T = 2.0
CONFIG = AllReduceConfig(chunk_bytes=400, window_bytes=3200, sender_timeout_s=T)
"""100 numbers in a chunk, two of them on the way to each of four others."""

METHOD = "averaging.test.reduce"
GROUP = b"g" * 16


class Watched:
    """A caller whose calls and answers a test can meddle with."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.before_call: Callable[[], Any] | None = None
        self.before_serving: Callable[[], Any] | None = None
        self.answered: Callable[[Reply], Reply] = lambda reply: reply
        self.num_served = self.most_served = 0

    def add_handler(self, method: str, handler: Handler, *, max_concurrent: int = 64) -> None:
        async def handle(request: Request) -> Reply:
            if self.before_serving is not None:
                await self.before_serving()
            self.num_served += 1
            self.most_served = max(self.most_served, self.num_served)
            try:
                return self.answered(await handler(request))
            finally:
                self.num_served -= 1

        self._caller.add_handler(method, handle, max_concurrent=max_concurrent)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._caller, name)

    async def call(
        self, target: Contact | Address, method: str, body: Body, tensors: Sequence[Outgoing] = (), **options: Any
    ) -> Reply:
        if self.before_call is not None:
            await self.before_call()
        return await self._caller.call(target, method, body, tensors, **options)


class Swarm:
    """Peers that can average as one group."""

    def __init__(self, callers: Sequence[Caller], members: list[Member], configs: Sequence[AllReduceConfig]) -> None:
        self.callers = list(map(Watched, callers))
        self.group = Group(group_id=GROUP, members=tuple(members), side=len(members))
        self.all_reduces = [
            AllReduce(caller, prefix="test", config=each) for caller, each in zip(self.callers, configs, strict=True)
        ]

    async def run(
        self,
        vectors: Sequence[Array | None],
        weights: Sequence[float | None] | None = None,
        *,
        delays_s: dict[int, float | None] | None = None,
    ) -> list[AllReduceResult]:
        """All of them at once, with their weights if any; some later, or (None) not at all. In member order."""
        results: dict[int, AllReduceResult] = {}
        size = next(vector.size for vector in vectors if vector is not None)

        async def one(index: int, delay_s: float) -> None:
            await trio.sleep(delay_s)
            vector, weight = vectors[index], None if weights is None else weights[index]
            results[index] = await self.all_reduces[index].run(self.group, vector, size=size, weight=weight)

        async with trio.open_nursery() as nursery:
            for index in range(len(vectors)):
                delay_s = (delays_s or {}).get(index, 0.0)
                if delay_s is not None:
                    nursery.start_soon(one, index, delay_s)
        return [results[index] for index in sorted(results)]

    async def again(self, number: int, vectors: Sequence[Array | None], *more: Any) -> list[AllReduceResult]:
        """A further all-reduce of the same members."""
        self.group = replace(self.group, group_id=number.to_bytes(16))
        return await self.run(vectors, *more)

    def part(self, index: int, size: int = 1234) -> tuple[int, int]:
        """(start, end) of what a member reduces."""
        part = parts_of(self.group, size, chunk_size=1)[index]
        return part.start, part.end


@asynccontextmanager
async def open_members(
    count: int,
    facts: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    hosts: HostOptions | Callable[[str], HostOptions] = HostOptions(),  # noqa: B008
) -> AsyncIterator[tuple[SimNetwork, list[RpcPeer], list[Member]]]:
    """So many peers on hosts 50 ms apart, as members of one group; `facts` are fields of a member that differ."""
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(simulate(latency=Constant(0.05), hosts=hosts))
        callers, members = [], []
        for index in range(count):
            host, own = f"host{index}", {"role": Role.NODE, **facts.get(index, {})}
            listen = None if own["role"] is Role.CLIENT else Address(host, 7)
            opened = open_rpc_peer(network.transport(host, peer(host)), peer_id=peer(host), listen=listen)
            callers.append(await stack.enter_async_context(opened))
            members.append(Member(peer_id=peer(host), address=callers[-1].address, wanted_slot=index, **own))
        yield network, callers, members


@asynccontextmanager
async def swarm(
    count: int,
    *,
    config: AllReduceConfig | Sequence[AllReduceConfig] = CONFIG,
    facts: dict[int, dict[str, Any]] | None = None,
    hosts: HostOptions | Callable[[str], HostOptions] = HostOptions(),  # noqa: B008
) -> AsyncIterator[Swarm]:
    """Members as of `open_members` that average."""
    async with open_members(count, facts or {}, hosts) as (_, callers, members):
        configs = [config] * count if isinstance(config, AllReduceConfig) else config
        yield Swarm(callers, members, configs)


def vectors(count: int, size: int = 1234) -> list[Array]:
    return [np.random.default_rng(index).standard_normal(size).astype(np.float32) for index in range(count)]


def mean(values: Sequence[Array], weights: Sequence[float] | None = None) -> Array:
    stacked = np.stack(values).astype(np.float64)
    return stacked.mean(axis=0) if weights is None else np.average(stacked, axis=0, weights=weights)


def assert_complete(results: list[AllReduceResult], expected: Array) -> None:
    """Everybody has all of it, and the very same."""
    for result in results:
        assert result.complete
        assert result.received == 1.0
        assert result.lost_reducers == result.lost_senders == ()
        assert np.array_equal(result.average, results[0].average)
        np.testing.assert_allclose(result.average, expected, rtol=1e-5, atol=1e-6)


def assert_has_its_part(average: Array, part: tuple[int, int], expected: Array) -> None:
    """An auxiliary member has its part, which is not empty, and zeros elsewhere."""
    start, end = part
    assert end > start
    np.testing.assert_allclose(average[start:end], expected[start:end], rtol=1e-5, atol=1e-6)
    assert not average[:start].any()
    assert not average[end:].any()
