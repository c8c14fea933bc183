"""Peers that average together in virtual time, round by round, for tests of the whole."""

import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import trio

from dmoe_net.averaging.averager import Averager, AveragingStep
from dmoe_net.averaging.config import AveragerConfig
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from dmoe_net.averaging.grouping.matchmaking import AssemblyConfig
from dmoe_net.averaging.opening import open_averager
from dmoe_net.averaging.plan import AveragingPlan
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from tests.net.averaging_swarm import Swarm, open_place

CONFIG = AveragerConfig(
    step_timeout_s=20.0, assembly=AssemblyConfig(), all_reduce=AllReduceConfig(sender_timeout_s=1.0, timeout_s=10.0)
)
SIZE = 50
ROUND_S = 40.0


def vector_of(name: str) -> np.ndarray:
    """A peer's own numbers."""
    return np.random.default_rng(zlib.crc32(name.encode())).normal(size=SIZE).astype(np.float32)


@asynccontextmanager
async def open_averaging(
    swarm: Swarm, name: str, plan: AveragingPlan, *, client_mode: bool = False, prefix: str = "x", **options: Any
) -> AsyncIterator[Averager]:
    """The averager of a peer alone on host `name`."""
    async with (
        open_place(swarm, name, client_mode=client_mode) as place,
        open_averager(
            place.rpc, place.dht, plan, prefix=prefix, rng=place.rng, **{"config": CONFIG, **options}
        ) as averager,
    ):
        yield averager


class Peers:
    """Peers that step together, one round every `ROUND_S` seconds; `values[name]` is what each holds."""

    def __init__(
        self,
        swarm: Swarm,
        grid: MoshpitGrid,
        num_peers: int,
        *,
        clients: Sequence[int] = (),
        cells: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.swarm = swarm
        self.names = [f"peer{index:02d}" for index in range(num_peers)]
        self.values = {name: vector_of(name) for name in self.names}
        self.steps: dict[str, list[AveragingStep]] = {name: [] for name in self.names}
        self.took_s: list[float] = []
        for index, name in enumerate(self.names):
            cell = index % grid.num_cells if cells is None else cells[index]
            weight = 1.0 if weights is None else weights[index]
            swarm.network.start(name, self._live, name, grid, cell, weight, index in clients)

    async def _live(self, name: str, grid: MoshpitGrid, cell: int, weight: float, is_client: bool) -> None:
        plan, config = AveragingPlan.of(size=SIZE, grid=grid), replace(CONFIG, cell=cell)
        async with open_averaging(self.swarm, name, plan, client_mode=is_client, config=config) as averager:
            for number in range(1, 100):
                await trio.sleep_until(number * ROUND_S)
                sent = self.values[name]
                began = trio.current_time()
                done = await averager.step(sent, weight=weight)
                weight = done.weight
                self.took_s.append(trio.current_time() - began)
                self.values[name] = sent + (done.average - sent)
                self.steps[name].append(done)

    def stacked(self, names: Sequence[str] | None = None) -> np.ndarray:
        """Values of the peers with these names, or of all, [peers, SIZE]."""
        return np.stack([self.values[name] for name in (self.names if names is None else names)])

    async def rounds(self, number: int) -> None:
        """Wait until so many rounds are over."""
        await trio.sleep_until((number + 1) * ROUND_S - 1.0)
