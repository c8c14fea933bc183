"""Several batches in one turn of the device: the same answers in fewer turns, and each fails alone."""

import copy
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import trio

from dmoe_jax.machine.device import CostModel, DeviceTime, InlineDevice
from dmoe_jax.metrics.node import KINDS
from dmoe_jax.node.backend import ExpertBackend, ExpertGroup
from dmoe_jax.node.programs import expert_programs
from dmoe_jax.node.queue import Job
from dmoe_jax.node.runner import BatchTimes, run_turn, sharing_programs
from dmoe_net.errors import CallRefused
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
    """Further requests for the expert come in a later turn, in order: a forward behind a backward sees its update."""
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


class GroupOf(ExpertGroup):
    """A group of experts, as a turn sees it."""

    def __init__(self, most: int = 1, begin: Any = None) -> None:
        programs: Any = copy.copy(expert_programs(EXPERT, SGD))
        programs.warm, programs.most_together = set(), lambda rows: most
        super().__init__(programs, ((), ()))
        self.begin = begin  # type: ignore[method-assign]

    def expert(self) -> ExpertBackend:
        """One of them."""
        backend = ExpertBackend(EXPERT, SGD, EXPERT.init(jax.random.key(0)))
        backend.group = self
        return backend


def asked(uid: str, count: int) -> list[Job]:
    """A batch of one request."""
    return [Job(uid=uid, inputs=(rows(count),), output_grads=rows(count))]


async def test_a_failing_batch_leaves_the_others_of_its_turn_alone() -> None:
    """A batch that fails, as it begins or later, takes with it only batches that share its program."""

    def fails(where: str) -> Any:
        raise ValueError(where)

    begins = {
        "a": lambda batches: lambda: ["done"],
        "b": lambda batches: fails("at once"),
        "c": lambda batches: lambda: fails("later"),
        "d": lambda batches: lambda: ["first", "second"],
    }
    experts = {uid: GroupOf(begin=begin).expert() for uid, begin in begins.items()}
    turn = [[asked(uid, 1)] for uid in "abc"] + [[asked("d", 1), asked("d", 2)]]
    done = run_turn(turn, experts, iter((10.0, 11.0, 13.0, 16.0, 20.0)).__next__)
    assert [str(each.outcome) for each in done] == ["done", "at once", "later", "first", "second"]
    assert [each.seconds for each in done] == [1.0, 2.0, 3.0, 2.0, 2.0]


async def test_batches_of_a_group_share_programs() -> None:
    """Up to 16 rows they are filled up to four times their bucket, beyond to twice; and no program is overfull."""

    def shared(most: int, *batches: tuple[str, int]) -> list[list[int]]:
        groups = {name: GroupOf(most) for name in "ab"}
        experts = {
            f"{name}{number}": (groups.get(name) or GroupOf()).expert() for number, (name, _) in enumerate(batches)
        }
        turn = [asked(f"{name}{number}", count) for number, (name, count) in enumerate(batches)]
        return [[turn.index(jobs) for jobs in program] for program in sharing_programs(turn, experts)]

    small = [("a", count) for count in (1, 16, 4)]
    assert shared(8, *small, ("b", 1), ("alone", 1), ("alone", 1)) == [[0], [1, 2], [3], [4], [5]]
    assert shared(8, *(("a", count) for count in (1, 64, 32, 16, 128))) == [[0], [1, 4], [2, 3]]
    assert shared(2, *[("a", 1)] * 5) == [[0, 1], [2, 3], [4]]


def test_batch_times_fade() -> None:
    """An unknown one takes for ever; then the newest counts for a fifth."""
    times = BatchTimes()
    assert times.expected_s("small") == float("inf")
    times.note("small", 1.0)
    times.note("small", 2.0)
    assert times.expected_s("small") == pytest.approx(1.2)
    assert times.expected_s("large") == float("inf")
