"""Nodes that claim and share experts in a simulated swarm, for the tests of `dmoe_jax.placement`."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
import trio

from dmoe_jax.directory.grid import expand_grid_pattern
from dmoe_jax.experts.base import Expert
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.machine.device import Device, InlineDevice
from dmoe_jax.placement.config import PlacementConfig
from dmoe_jax.placement.replicas import Replicas
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.serving import Served
from dmoe_jax.swarm.swarm import Swarm
from dmoe_net.transport.sim import Constant, SimNetwork, run, simulate

ENTRANCE = "entrance:1"
EXPERT = feedforward(d_model=4)
SGD = optax.sgd(0.01)
"""One object, so that what one test compiles serves the others."""
PATTERN = "ffn.[0:4].[0:5]"
UIDS = {str(uid) for uid in expand_grid_pattern(PATTERN)}
X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


class World:
    """A simulated swarm. Its nodes are programs that end when their host goes down, and begin again when it is up."""

    def __init__(self, network: SimNetwork, entrance: Swarm) -> None:
        self.network, self.entrance = network, entrance
        self.served: dict[str, Served] = {}
        self.said: dict[str, list[str]] = {}

    def start(self, name: str, experts: Mapping[str, Expert] | None = None, **options: Any) -> None:
        """Start a node; options as of `Swarm.serve`, fields of its `PlacementConfig`, and what makes its `device`."""
        device = options.pop("device", InlineDevice)
        fields = {key: options.pop(key) for key in list(options) if key in PlacementConfig.__dataclass_fields__}
        options = {"optimizer": SGD, "placement": PlacementConfig(**fields), **options}
        self.network.start(name, self._live, name, experts or {PATTERN: EXPERT}, device, options)

    async def _live(self, name: str, experts: Any, device: Callable[[], Device], options: dict[str, Any]) -> None:
        said = self.said[name] = []
        try:
            async with open_swarm(ENTRANCE, network=self.network, host=name, seed=0, device=device()) as swarm:
                self.served[name] = await swarm.serve(experts, on_progress=said.append, **options)
                await trio.sleep_forever()
        finally:
            self.served.pop(name, None)

    async def until(self, holds: Callable[[], bool], *, within_s: float) -> None:
        """Wait until something is so."""
        with trio.fail_after(within_s):
            while not holds():  # noqa: ASYNC110 (nobody could set an event)
                await trio.sleep(0.25)

    async def settled(self, count: int, *, times: int = 1, within_s: float = 60) -> None:
        """Wait until so many nodes serve each expert so many times."""
        await self.until(lambda: len(self.served) == count and self.all_served(times), within_s=within_s)

    def holders(self) -> dict[str, list[str]]:
        """The nodes that serve each expert."""
        found: dict[str, list[str]] = {}
        for name, served in self.served.items():
            for uid in served.node.status()["updates"]:
                found.setdefault(uid, []).append(name)
        return found

    def all_served(self, times: int = 1, uids: set[str] = UIDS) -> bool:
        """Return True if `times` nodes serve each expert, and announce it: no claim is held any more."""
        holders = self.holders()
        is_so = holders.keys() == uids and all(len(names) == times for names in holders.values())
        return is_so and not any(self.claims(name)["held"] for name in self.served)

    def claims(self, name: str) -> dict[str, Any]:
        """A node's word on its claims."""
        return self.served[name].node.status()["claims"]

    def copies(self, name: str) -> dict[str, Any]:
        """A node's word on its averages and states."""
        return self.served[name].node.status()["replicas"]

    def replicas(self, name: str) -> Replicas:
        """The `Replicas` of a node, which average its experts."""
        return self.served[name].node.replicas

    def numbers(self, name: str) -> dict[str, list[np.ndarray]]:
        """Copies of all that is averaged, parameters and the optimiser's moments, of each expert of a node."""
        states = {uid: jax.tree.leaves(backend.state) for uid, backend in self.served[name].backends.items()}
        return {uid: [np.array(leaf) for leaf in found if leaf.dtype == np.float32] for uid, found in states.items()}

    def check_agree(self, one: str, other: str) -> None:
        """Make sure that two nodes have the same experts, to a rounding or two."""
        mine, theirs = self.numbers(one), self.numbers(other)
        assert mine.keys() == theirs.keys()
        for uid in mine:
            for left, right in zip(mine[uid], theirs[uid], strict=True):
                np.testing.assert_allclose(left, right, atol=1e-6, rtol=0, err_msg=uid)


def in_world(body: Callable[[World], Awaitable[None]], *, latency_s: float = 0.05) -> None:
    """Run a test in virtual time: with the entrance, a peer that serves nothing."""

    async def main() -> None:
        async with (
            simulate(latency=Constant(latency_s)) as network,
            open_swarm(network=network, host="entrance", seed=0) as entrance,
        ):
            await body(World(network, entrance))

    run(main)
