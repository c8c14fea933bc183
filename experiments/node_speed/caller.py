"""A process of callers, a helper of the measurement: each asks as a trainer does, through a `RemoteMixture`.

An order {"begin", "end"} has all callers make layer calls, forward and then backward, from now until `end` is past;
what ends between the two counts. Times are of `time.perf_counter`, whose clock the processes of a machine share.
"""

import math
import random
import sys
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import jax
import numpy as np
import trio

from dmoe_jax import Swarm, open_swarm
from dmoe_jax.directory.grid import Coordinates, ExpertUid
from dmoe_jax.mixture.expert_calls import ExpertCall
from dmoe_jax.mixture.remote import Choice, RemoteMixture
from dmoe_jax.routing.product_key import product_key
from dmoe_net.errors import NetError
from dmoe_net.identity import Contact
from experiments.node_speed.cases import Case
from experiments.node_speed.expert import PREFIX, hivemind_ffn
from experiments.processes import orders, run_helper, say

_TIMEOUT_S = 120.0
"""Timeout of a call: nobody is given up while a large expert is saved."""


@dataclass(slots=True)
class Tally:
    """Counts and times of the layer calls that ended in a slice.

    Args:
      begin, end: of the slice, by `time.perf_counter`.
    """

    begin: float
    end: float
    samples: int = 0
    """Rows that went forward and backward, counted once for each expert."""
    forward_s: list[float] = field(default_factory=list)
    """Seconds of each layer call until its outputs were there."""
    backward_s: list[float] = field(default_factory=list)
    """Seconds until its gradients were there."""

    def note(self, samples: int, times: tuple[float, float, float]) -> None:
        """Count a layer call: when its forward began, when its backward began and when that ended.

        Whatever ended in the slice counts whole, though it began before; in return what ends later does not count.
        """
        started, between, ended = times
        if self.begin <= ended < self.end:
            self.samples += samples
            self.forward_s.append(between - started)
            self.backward_s.append(ended - between)

    def summary(self) -> dict[str, float]:
        """Return samples and layer calls of a slice, and their median and longest times, seconds, if anything ended."""
        found: dict[str, float] = {"samples": self.samples, "layer_calls": len(self.forward_s)}
        for name in ("forward_s", "backward_s") if self.forward_s else ():
            found |= {name: median(getattr(self, name)), f"longest_{name}": max(getattr(self, name))}
        return found


class CallFailedError(Exception):
    """An expert did not answer, which spoils the measurement."""


class Caller:
    """One caller: draws experts, asks them, sends gradients back.

    Args:
      case: what it asks.
      living: the experts by coordinates, and where they are.
      seed: of all that it draws.
    """

    def __init__(self, case: Case, mixture: RemoteMixture, living: dict[Coordinates, Contact], seed: int) -> None:
        self._case, self._mixture, self._living = case, mixture, living
        self._rng = random.Random(seed)
        rng = np.random.default_rng(seed)
        self._x = rng.normal(size=(case.rows, case.d_model)).astype(np.float32)
        self._grads = rng.normal(size=(case.rows, case.at_once, case.d_model)).astype(np.float32)

    async def run(self, tally: Tally) -> None:
        """Make layer calls until the slice is over; the last one ends later.

        Raises:
          CallFailedError: somebody did not answer.
        """
        while time.perf_counter() < tally.end:
            rows = self._rows()
            choice = self._choice(rows)
            started = time.perf_counter()
            _, answered, residual = await self._mixture.forward(choice, [self._x[:rows]])
            between = time.perf_counter()
            await self._mixture.backward(residual, self._grads[:rows])
            tally.note(rows * self._case.at_once, (started, between, time.perf_counter()))
            if not answered.all() or self._mixture.statistics.failures:
                raise CallFailedError(f"calls of {self._case.name} failed: {self._mixture.statistics.failures}")

    def _rows(self) -> int:
        """Rows of the next layer call."""
        if not self._case.is_mixed:
            return self._case.rows
        # Uniform in the logarithm: as many from 1 to 2 as from 128 to 256.
        return max(1, round(self._case.rows ** self._rng.random()))

    def _choice(self, rows: int) -> Choice:
        """All rows to `at_once` experts, as a router would have chosen them."""
        chosen = self._rng.sample(sorted(self._living), self._case.at_once)
        calls = tuple(
            ExpertCall(
                uid=str(ExpertUid(PREFIX, coordinates)),
                contact=self._living[coordinates],
                rows=np.arange(rows),
                slots=np.full(rows, slot),
            )
            for slot, coordinates in enumerate(chosen)
        )
        indices = np.broadcast_to(np.array(chosen, np.int32), (rows, len(chosen), 1))
        return Choice(indices, calls)


async def call(*, case: dict[str, Any], contact: str, callers: int, seed: int, number: int) -> None:
    """Call a node whenever that is ordered, until standard input closes.

    Args:
      case: the fields of a `Case`.
      contact: the node's.
      callers: how many of the case's callers this process has.
      seed: of all that is drawn.
      number: of this process among those with callers.
    """
    # Nothing is computed here, and a GPU's memory is the node's.
    jax.config.update("jax_platforms", "cpu")
    own = Case(**case)
    try:
        async with open_swarm(contact, listen=None) as swarm:
            mixture = _mixture(swarm, own)
            await mixture.check()
            living = await mixture.living()
            if len(living) != own.experts:
                raise CallFailedError(f"expected {own.experts} experts of {own.name}, found {len(living)}")
            everyone = [Caller(own, mixture, living, seed * 10**6 + number * 10**3 + each) for each in range(callers)]
            say(ready=True)
            async for order in orders():
                tally = Tally(begin=order["begin"], end=order["end"])
                async with trio.open_nursery() as nursery:
                    for each in everyone:
                        nursery.start_soon(each.run, tally)
                say(**tally.summary())
    except* (CallFailedError, NetError) as errors:
        leaf: BaseException = errors
        while isinstance(leaf, BaseExceptionGroup):
            leaf = leaf.exceptions[0]
        sys.exit(f"node_speed: {leaf}")


def _mixture(swarm: Swarm, case: Case) -> RemoteMixture:
    """A mixture that waits for every answer. Its router is never asked."""
    return swarm.mixture(
        PREFIX,
        hivemind_ffn(case.d_model),
        product_key((case.experts,)),
        k_best=case.at_once,
        k_min=case.at_once,
        grace_s=math.inf,
        timeout_s=_TIMEOUT_S,
        on_shortfall="raise",
    )


if __name__ == "__main__":
    run_helper(call)
