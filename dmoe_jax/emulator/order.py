"""The order of events of an asynchronous swarm: who reads which version, and when each expert computes.

The results of an asynchronous run follow from the order of its events, and from nothing else of their times: when a
trainer reads the trunk and when it writes to it, when each expert computes a call, and which calls are never answered.
An `EventOrder` is that order, as arrays: drawn from a model of latencies (`draw_order`), or made of what a real run
recorded (`order_of`).
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from dmoe_jax.checks import check_positive

FORWARD = 0
"""An expert computes one call of a forward pass."""
BACKWARD = 1
"""An expert computes one call of a backward pass, and is updated."""
STAGE = 2
"""A trainer computes: this number plus that of the stage, see `num_stages`."""

DelayOf = Callable[[np.random.Generator, int], np.ndarray]
"""(generator, calls) -> for each call, seconds from its placing until its expert computes it."""


def num_stages(num_layers: int) -> int:
    """Number of things that a trainer does between its waits for experts. By number, for n layers:

    0: reads the trunk, computes up to the first mixture, places its calls. l from 1 to n - 1: mixes the answers of
    layer l - 1 and computes up to layer l. n: mixes, computes the loss and its gradient, places the backward calls of
    the last layer. 2 n - l, for l from n - 1 to 1: has the gradients of the inputs of layer l and places the backward
    calls of layer l - 1. 2 n: updates the trunk.
    """
    return 2 * num_layers + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOrder:
    """Events, one after another.

    A call is named by its expert, or by the first pair of a sample and a slot that it serves, number
    `sample * slots + slot`: which expert a pair goes to is the router's decision, and the events of pairs that share an
    expert with an earlier pair of their batch do nothing. A batch's call of one expert is one call, as in the swarm.

    Attributes:
      kind: `FORWARD`, `BACKWARD` or `STAGE` and the number of the stage.
      trainer: whose step it is part of.
      layer: of a call.
      pair: of a call without an expert.
      expert: layer * cells + cell, or -1.
      answered: True if the trainer ever has the call's answer.
      computed: True if the expert computes the call at all. A backward call without an answer may train all the same.
      num_trainers, num_layers, num_pairs: sizes; pairs are those of one layer of one step.
    """

    kind: Int[np.ndarray, " events"]
    trainer: Int[np.ndarray, " events"]
    layer: Int[np.ndarray, " events"]
    pair: Int[np.ndarray, " events"]
    expert: Int[np.ndarray, " events"]
    answered: Bool[np.ndarray, " events"]
    computed: Bool[np.ndarray, " events"]
    num_trainers: int
    num_layers: int
    num_pairs: int

    @property
    def steps(self) -> int:
        """The largest number of steps that a trainer begins: so many batches it needs."""
        return int(np.bincount(self.trainer[self.kind == STAGE], minlength=1).max())

    @property
    def updates(self) -> Int[np.ndarray, " updates"]:
        """The places of the trunk's updates in the order."""
        return np.flatnonzero(self.kind == STAGE + num_stages(self.num_layers) - 1)


def order_of(rows: np.ndarray, *, num_trainers: int, num_layers: int, num_pairs: int) -> EventOrder:
    """The order whose events are the rows of an array of integers; its columns are the fields of `EventOrder`."""
    *numbers, answered, computed = rows.T
    kind, trainer, layer, pair, expert = (column.astype(np.int32) for column in numbers)
    return EventOrder(
        kind=kind,
        trainer=trainer,
        layer=layer,
        pair=pair,
        expert=expert,
        answered=answered.astype(bool),
        computed=computed.astype(bool),
        num_trainers=num_trainers,
        num_layers=num_layers,
        num_pairs=num_pairs,
    )


def exponential_delays(mean_s: float) -> DelayOf:
    """Exponentially distributed delays, as Learning@home emulates them (section 4.1)."""
    return lambda rng, calls: rng.exponential(mean_s, calls)


def draw_order(
    *,
    num_updates: int,
    num_trainers: int,
    num_layers: int,
    num_pairs: int,
    delay: DelayOf,
    failure_rate: float = 0.0,
    concurrency: int | None = None,
    seed: int = 0,
) -> EventOrder:
    """The order of a run in which trainers compute in no time and every call has a delay of its own.

    A layer's answers are waited for together. A call that fails is noticed when its answer would have come; its expert
    does not compute it. Pairs that share an expert have one call in the swarm but a delay each here, so that a layer
    takes a little longer than in the swarm.

    Args:
      num_updates: of the trunk, after which the order ends.
      num_layers: mixtures of the model.
      num_pairs: samples of a batch times experts for each.
      delay: of the calls. seed: of delays and failures.
      failure_rate: share of calls without an answer, 0 to below 1.
      concurrency: most trainers at work at once; one that has ended a step lets those that waited longer go first. With
        1 nothing is stale. None: all of them.

    Raises:
      ValueError: a number is not positive, or the rate not a share.
    """
    at_work = num_trainers if concurrency is None else min(concurrency, num_trainers)
    check_positive(num_updates=num_updates, num_trainers=num_trainers, num_layers=num_layers, num_pairs=num_pairs)
    check_positive(concurrency=at_work)
    if not 0 <= failure_rate < 1:
        raise ValueError(f"failure_rate must be from 0 to below 1, got {failure_rate}")
    rng = np.random.default_rng(seed)
    last = num_stages(num_layers) - 1
    # Every entry is an event, or all calls of a layer of a step: (time, number, trainer, stage that begins).
    waiting = [(0.0, trainer, trainer, 0) for trainer in range(at_work)]
    heapq.heapify(waiting)
    idle = deque(range(at_work, num_trainers))
    made = len(waiting)
    times: list[np.ndarray] = []
    events: list[np.ndarray] = []
    updates = 0
    while updates < num_updates:
        now, _, trainer, stage = heapq.heappop(waiting)
        events.append(np.array([[STAGE + stage, trainer, 0, 0, -1, 1, 1]]))
        times.append(np.array([now]))
        if stage == last:
            updates += 1
            idle.append(trainer)
            ends, trainer, following = now, idle.popleft(), 0
        else:
            kind, layer = (FORWARD, stage) if stage < num_layers else (BACKWARD, last - 1 - stage)
            done = now + delay(rng, num_pairs)
            calls = np.tile([kind, trainer, layer, 0, -1, 0, 0], (num_pairs, 1))
            calls[:, 3] = np.arange(num_pairs)
            calls[:, 5:] = (rng.random(num_pairs) >= failure_rate)[:, None]  # who computes a call answers it
            events.append(calls)
            times.append(done)
            ends, following = float(done.max()), stage + 1
        heapq.heappush(waiting, (ends, made, trainer, following))
        made += 1
    when, rows = np.concatenate(times), np.concatenate(events)
    rows = rows[np.argsort(when, kind="stable")]
    end = np.flatnonzero(rows[:, 0] == STAGE + last)[num_updates - 1]
    return order_of(rows[: end + 1], num_trainers=num_trainers, num_layers=num_layers, num_pairs=num_pairs)
