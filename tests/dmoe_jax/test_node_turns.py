"""Several batches in one turn of the device: the same answers in fewer turns, and each fails alone."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import trio

from dmoe_jax.device import CostModel, DeviceTime, InlineDevice
from dmoe_jax.metrics.node import KINDS
from dmoe_jax.node import turns
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.turns import BatchTimes, run_turn
from net.errors import CallRefused
from tests.dmoe_jax.node_rig import EXPERT, SGD, Rig, open_rig, rows

UIDS = tuple(f"ffn.{index}" for index in range(4))


class TurnDevice(InlineDevice):
    """The way to it is worth many batches; each turn takes a second of virtual time."""

    turn_s = 100.0

    def __init__(self) -> None:
        super().__init__(CostModel(call_s=1.0))
        self.turns: list[str] = []

    async def run(
        self, function: Callable[..., Any], *args: Any, spent: DeviceTime | None = None, expected_s: float = math.inf
    ) -> Any:
        name = getattr(function, "__name__", "")
        self.turns.append(name if name in KINDS else "turn")
        return await super().run(function, *args, spent=spent, expected_s=expected_s)


def backends() -> dict[str, ExpertBackend]:
    return {uid: ExpertBackend(EXPERT, SGD, EXPERT.init(jax.random.key(index))) for index, uid in enumerate(UIDS)}


async def ask_all(rig: Rig, number: int) -> list[Any]:
    """A backward of every expert at once; gradients in their order. The last expert's are too large for it."""
    answers: list[Any] = [None] * len(UIDS)

    async def ask(index: int) -> None:
        grads = rows(2, seed=index) if index < 3 or number else np.full((2, 4), 3e38, np.float32)
        try:
            reply = await rig.backward(UIDS[index], b"%d %d" % (number, index), 10 * rows(2, seed=9), grads)
            answers[index] = np.asarray(reply.tensors[0])
        except CallRefused as error:
            answers[index] = str(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.forward, UIDS[0], rows(1))  # keeps the device busy while they arrive
        await trio.sleep(0.1)
        for index in range(len(UIDS)):
            nursery.start_soon(ask, index)
    return answers


async def test_small_batches_of_several_experts_share_a_turn(autojump_clock: trio.testing.MockClock) -> None:
    """Once it is known how long they take. Answers, updates and refusals are those of batches alone."""
    device, alone = TurnDevice(), backends()
    async with open_rig(device=device, backends=backends()) as rig:
        first = await ask_all(rig, 0)
        assert first[3].endswith("its gradient would make expert ffn.3 not finite")
        device.turns.clear()
        second = await ask_all(rig, 1)
        assert device.turns == ["forward", "turn"]
        for number, answers in enumerate((first, second)):
            for index in range(4 if number else 3):
                (expected,) = alone[UIDS[index]].backward([10 * rows(2, seed=9)], rows(2, seed=index))
                np.testing.assert_array_equal(answers[index], expected)
        assert rig.node.status()["updates"] == dict.fromkeys(UIDS[:3], 2) | {UIDS[3]: 1}
        for uid in UIDS:
            jax.tree.map(np.testing.assert_array_equal, rig.backends[uid].params, alone[uid].params)


async def test_an_expert_has_one_batch_in_a_turn(autojump_clock: trio.testing.MockClock) -> None:
    """What else waits for it comes in a later turn, in order: a forward behind a backward sees its update."""
    device = TurnDevice()
    async with open_rig(device=device, backends=backends()) as rig:
        await ask_all(rig, 1)
        updates: list[int] = []

        async def forward() -> None:
            updates.append((await rig.forward(UIDS[1], rows(2))).body["updates"])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.forward, UIDS[0], rows(1))
            await trio.sleep(0.1)
            nursery.start_soon(rig.backward, UIDS[1], b"more", rows(2), rows(2))
            await trio.sleep(0.1)
            nursery.start_soon(forward)
        assert updates == [2]
        assert device.turns[-2:] == ["backward", "forward"]


def test_a_failing_batch_leaves_the_others_of_its_turn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it fails as it begins or later."""

    def fails(where: str) -> Any:
        raise ValueError(where)

    begun = iter([lambda: (rows(1),), "at once", lambda: fails("later")])

    def begin(group: Any, backends: Any) -> Any:
        found = next(begun)
        return fails(found) if isinstance(found, str) else found

    monkeypatch.setattr(turns, "_begin", begin)
    outcomes = run_turn([[]] * 3, {}, iter((10.0, 11.0, 13.0, 16.0)).__next__)
    np.testing.assert_array_equal(outcomes[0].results[0], rows(1))
    assert [str(outcome.error) for outcome in outcomes] == ["None", "at once", "later"]
    assert [outcome.seconds for outcome in outcomes] == [1.0, 2.0, 3.0]


def test_batch_times_fade() -> None:
    """An unknown one takes for ever; then the newest counts for a fifth."""
    times = BatchTimes()
    assert times.expected_s("small") == float("inf")
    times.note("small", 1.0)
    times.note("small", 2.0)
    assert times.expected_s("small") == pytest.approx(1.2)
    assert times.expected_s("large") == float("inf")
