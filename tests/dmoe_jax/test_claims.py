"""Nodes that claim experts, in a simulated swarm: who serves what, who takes over from whom, and who gives way."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
import trio

from dmoe_jax.claims.claiming import ClaimConfig
from dmoe_jax.claims.records import claim_item
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.grid import expand_grid_pattern, parse_uid
from dmoe_jax.node.expert_store import ExpertStore
from dmoe_jax.node.server import NodeConfig
from dmoe_jax.routing import product_key
from dmoe_jax.serving import Served
from dmoe_jax.swarm import Swarm, open_swarm
from net.identity import Contact
from net.transport.sim import run, simulate
from net.transport.sim.events import Heal, HostDown, Partition
from net.transport.sim.network import SimNetwork

EXPERT = feedforward(d_model=4)
SGD = optax.sgd(0.01)
PATTERN = "ffn.[0:4].[0:5]"
UIDS = {str(uid) for uid in expand_grid_pattern(PATTERN)}
ENTRANCE = "entrance:1"


class World:
    """A simulated swarm; its nodes are programs that end when their host goes down."""

    def __init__(self, network: SimNetwork) -> None:
        self.network = network
        self.served: dict[str, Served] = {}
        self.said: dict[str, list[str]] = {}

    def start(self, name: str, **options: Any) -> None:
        """A node; options as of `Swarm.serve`."""
        self.network.start(name, self._live, name, options)

    async def _live(self, name: str, options: dict[str, Any]) -> None:
        said = self.said.setdefault(name, [])
        try:
            async with open_swarm(ENTRANCE, network=self.network, host=name, seed=0) as swarm:
                experts = options.pop("experts", {PATTERN: EXPERT})
                served = await swarm.serve(experts, optimizer=SGD, on_progress=said.append, **options)
                self.served[name] = served
                await trio.sleep_forever()
        finally:
            self.served.pop(name, None)

    async def until(self, holds: Callable[[], bool], *, within_s: float) -> float:
        """Wait until something is so; returns how long it took, seconds."""
        started = trio.current_time()
        with trio.fail_after(within_s):
            while not holds():
                await trio.sleep(0.25)
        return trio.current_time() - started

    def holders(self) -> dict[str, list[str]]:
        """The nodes that serve each expert."""
        found: dict[str, list[str]] = {}
        for name, served in self.served.items():
            for uid in served.node.status()["updates"]:
                found.setdefault(uid, []).append(name)
        return found

    def all_served_once(self) -> bool:
        holders = self.holders()
        return holders.keys() == UIDS and all(len(names) == 1 for names in holders.values())

    def claims(self, name: str) -> dict[str, Any]:
        claims: dict[str, Any] = self.served[name].node.status()["claims"]
        return claims


def in_world(body: Callable[[World, Swarm], Awaitable[None]], seed: int = 0) -> None:
    """Run a test in virtual time: with the entrance, a peer that serves nothing."""

    async def main() -> None:
        async with simulate(seed=seed) as network, open_swarm(network=network, host="entrance", seed=0) as entrance:
            await body(World(network), entrance)

    run(main, seed=seed)


@pytest.mark.parametrize(("count", "most"), [(2, 12), (5, 5)])
def test_claimers_that_start_together_share_the_experts(count: int, most: int) -> None:
    """Each expert is served exactly once, nobody above its bound or its share by much, and the DHT says who serves it."""

    async def body(world: World, entrance: Swarm) -> None:
        names = [f"node{index}" for index in range(count)]
        for name in names:
            world.start(name, claim=ClaimConfig(max_experts=most))
        await world.until(lambda: len(world.served) == count and world.all_served_once(), within_s=60)
        counts = Counter(names[0] for names in world.holders().values())
        # 20 experts in rounds of at most ceil(20 / count) each: as nobody took a claim of another's, equal shares.
        assert set(counts.values()) == {20 // count}
        for name in names:
            claims = world.claims(name)
            assert claims["room"] == most - counts[name]
            assert claims["adopted"] == {"seed": counts[name]}
            assert (claims["won"], claims["held"]) == (counts[name], 0)
        listed = await entrance.directory.living("ffn", (4, 5))
        own = {name: world.served[name].node for name in names}
        assert len(listed) == 20
        for coordinates, contact in listed.items():
            assert ".".join(("ffn", *map(str, coordinates))) in own[contact.address.host].status()["updates"]
        (member, *_) = [member for member in await entrance.members() if member.contact.address.host == "node0"]
        assert member.info["room"] == most - counts["node0"] and member.grids == ("ffn",)

    in_world(body)
