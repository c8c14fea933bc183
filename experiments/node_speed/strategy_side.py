"""A process that runs experts by both strategies, a helper of the measurement; no network, no queue.

It has the same experts twice, each by programs of its own and stacked (`dmoe_jax.node.stacked`), and says when it is
ready what a node would choose. An order {"strategy", "rows", "for_s"} is answered with the samples a second of turns in
which every expert computes a batch of so many rows, forward, then backward with its step: XLA begins all of a turn
before the first result is waited for, as in a node's turn.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from dmoe_jax.machine.device import ThreadDevice
from dmoe_jax.node.backend import ExpertBackend, make_backends
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.programs import Batch
from dmoe_jax.node.sharding import PlacedDevice, placed
from dmoe_jax.node.stacked import Strategies
from dmoe_jax.runs.setting_up import set_up_jax
from experiments.node_speed.cases import STRATEGIES, Strategy
from experiments.node_speed.expert import ADAM, PREFIX, hivemind_ffn
from experiments.processes import orders, run_helper, say


class Turns:
    """Turns of a node that has work for all of its experts.

    Args:
      backends: the experts.
      d_model: their width.
      seed: of what they are asked.
    """

    def __init__(self, backends: Sequence[ExpertBackend], d_model: int, seed: int) -> None:
        self._backends, self._d_model = backends, d_model
        self._rng = np.random.default_rng(seed)

    def samples_per_s(self, rows: int, *, for_s: float) -> float:
        """Take turns, after two that warm up and may compile.

        Args:
          rows: of each expert's batch.
          for_s: seconds to go on; at least one turn.

        Returns: rows of all experts that went forward and backward, a second.
        """
        first = self._backends[0]
        # As in a node, which has programs for all sizes: with fewer, a batch is filled up to the next that there is.
        first.warm_up_bucket(max(first.bucket_of(rows), first.programs.least_rows))
        x, grads = self._rng.normal(size=(2, rows, self._d_model)).astype(np.float32)
        batches = Batch(inputs=(x,)), Batch(inputs=(x,), output_grads=grads)
        for _ in range(2):
            self._turn(batches, rows)
        started, count = time.perf_counter(), 0
        while (took := time.perf_counter() - started) < for_s or not count:
            self._turn(batches, rows)
            count += 1
        return count * rows * len(self._backends) / took

    def _turn(self, batches: Sequence[Batch], rows: int) -> None:
        """One forward pass of each expert, then one backward pass."""
        most = self._backends[0].programs.most_together(rows)
        groups = [self._backends[start : start + most] for start in range(0, len(self._backends), most)]
        for batch in batches:
            begun = [group[0].group.begin([(each, batch) for each in group]) for group in groups]
            for finish in begun:
                for outcome in finish():
                    if isinstance(outcome, Exception):
                        raise outcome


async def settled(
    experts: int,
    d_model: int,
    strategy: Literal["auto", "single", "stacked"],
    devices: Sequence[PlacedDevice],
    seed: int,
) -> tuple[list[ExpertBackend], dict[str, Any]]:
    """Experts as a node of this strategy has them before it serves, and what `Strategies.status` says of them."""
    backends = make_backends({f"{PREFIX}.[0:{experts}]": hivemind_ffn(d_model)}, ADAM, seed=seed)
    strategies = Strategies(backends, devices, NodeConfig(strategy=strategy), may_adopt=False)
    await strategies.settle(lambda text: None)
    return list(backends.values()), strategies.status()[0]


async def take_turns(*, experts: int, d_model: int, seed: int) -> None:
    """Answer orders until standard input closes.

    Args:
      experts: how many there are of each strategy.
      d_model: their width.
      seed: of the experts, and of what they are asked.
    """
    set_up_jax()
    devices = placed(ThreadDevice())
    _, choice = await settled(experts, d_model, "auto", devices, seed)
    turns: dict[Strategy, Turns] = {}
    for strategy in STRATEGIES:
        backends, _ = await settled(experts, d_model, strategy, devices, seed)
        turns[strategy] = Turns(backends, d_model, seed)
    say(strategy=choice["strategy"], why=choice["why"])
    async for order in orders():
        measure = partial(turns[order["strategy"]].samples_per_s, order["rows"], for_s=order["for_s"])
        rate = await devices[0].device.run(measure)
        say(samples_per_s=rate)


if __name__ == "__main__":
    run_helper(take_turns)
