"""Turns of a device, and what waits for them: who is turned away, who goes first, for whom a batch waits a moment."""

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import trio

from dmoe_jax.machine.device import CostModel, DeviceTime, InlineDevice
from dmoe_jax.metrics.node import KINDS
from dmoe_jax.node.backend import ExpertBackend, ExpertGroup, make_backends
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.programs import expert_programs
from dmoe_jax.node.queue import Job
from dmoe_jax.node.runner import run_turn, sharing_programs
from dmoe_net.errors import CallRefused, PeerBusy
from tests.dmoe_jax.node_rig import EXPERT, SGD, Rig, open_rig, rows
from tests.dmoe_jax.test_batching import asked, queue_of

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
    return make_backends(dict.fromkeys(UIDS, EXPERT), SGD, seed=0)


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


def check_as_alone(rig: Rig, alone: dict[str, ExpertBackend], rounds: list[Any], *, rtol: float, atol: float) -> None:
    """The answers of each `ask_all`, and what experts have learnt, are those of experts alone."""
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    for number, answers in enumerate(rounds):
        for index in range(4 if number else 3):
            (expected,) = alone[UIDS[index]].backward([10 * rows(2, seed=9)], rows(2, seed=index))
            close(answers[index], expected)
    count = len(rounds)
    assert rig.node.status()["updates"] == dict.fromkeys(UIDS[:3], count) | {UIDS[3]: count - 1}
    for uid in UIDS:
        jax.tree.map(close, rig.backends[uid].params, alone[uid].params)


async def test_small_batches_of_several_experts_share_a_turn(autojump_clock: trio.testing.MockClock) -> None:
    """Once it is known how long they take. Answers, updates and refusals are those of batches alone."""
    device, alone = TurnDevice(), backends()
    async with open_rig(device=device, backends=backends()) as rig:
        first = await ask_all(rig, 0)
        assert first[3].endswith("its gradient would make expert ffn.3 not finite")
        device.turns.clear()
        second = await ask_all(rig, 1)
        assert device.turns == ["forward", "turn"]
        check_as_alone(rig, alone, [first, second], rtol=0, atol=0)


async def test_an_expert_has_one_batch_in_a_turn(autojump_clock: trio.testing.MockClock) -> None:
    """Further requests for the expert come in a later turn, in order: a forward behind a backward sees its update."""
    device = TurnDevice()
    async with open_rig(device=device, backends=backends()) as rig:
        await ask_all(rig, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.forward, UIDS[0], rows(1))
            await trio.sleep(0.1)
            nursery.start_soon(rig.backward, UIDS[1], b"more", rows(2), rows(2))
            await trio.sleep(0.1)
            assert (await rig.forward(UIDS[1], rows(2))).body["updates"] == 2
        assert device.turns[-2:] == ["backward", "forward"]


class GroupOf(ExpertGroup):
    def __init__(self, most: int = 1, begin: Any = None) -> None:
        programs: Any = copy.copy(expert_programs(EXPERT, SGD))
        programs.warm, programs.most_together = set(), lambda rows: most
        super().__init__(programs, ((), ()))
        self.begin = begin  # type: ignore[method-assign]

    def expert(self) -> ExpertBackend:
        backend = ExpertBackend(EXPERT, SGD, EXPERT.init(jax.random.key(0)))
        backend.group = self
        return backend


def batch_of(uid: str, count: int) -> list[Job]:
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
    turn = [[batch_of(uid, 1)] for uid in "abc"] + [[batch_of("d", 1), batch_of("d", 2)]]
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
        turn = [batch_of(f"{name}{number}", count) for number, (name, count) in enumerate(batches)]
        return [[turn.index(jobs) for jobs in program] for program in sharing_programs(turn, experts)]

    small = [("a", count) for count in (1, 16, 4)]
    assert shared(8, *small, ("b", 1), ("alone", 1), ("alone", 1)) == [[0], [1, 2], [3], [4], [5]]
    assert shared(8, *(("a", count) for count in (1, 64, 32, 16, 128))) == [[0], [1, 4], [2, 3]]
    assert shared(2, *[("a", 1)] * 5) == [[0, 1], [2, 3], [4]]


CONFIG = NodeConfig(max_batch_rows=4, max_wait_s=2.0)
TENTH = CostModel(row_s=0.1)


@pytest.mark.slow
async def test_a_flood_of_backward_calls_leaves_room_for_forward_ones(autojump_clock: trio.testing.MockClock) -> None:
    """A forward call is always taken, and no call waits for longer than the bound and the running batch."""
    async with open_rig(cost=TENTH, config=CONFIG) as rig:
        hints: list[float | None] = []
        await rig.forward("ffn.2.3", rows(2))  # now it is known how long they take
        await rig.backward("ffn.0.1", b"first", rows(2), 0 * rows(2))

        async def flood(caller: int) -> None:
            for number in range(10**6):
                try:
                    await rig.backward("ffn.0.1", b"%d %d" % (caller, number), rows(2), 0 * rows(2))
                except PeerBusy as busy:
                    hints.append(busy.retry_after_s)
                    await trio.sleep(0.05)

        waited: list[float] = []
        async with trio.open_nursery() as nursery:
            for caller in range(50):
                nursery.start_soon(flood, caller)
            await trio.sleep(5.0)
            accepted_before = rig.node.recorder.queue_s["backward"].count
            for _ in range(20):
                since = trio.current_time()
                await rig.forward("ffn.2.3", rows(2), timeout_s=60.0)
                waited.append(trio.current_time() - since)
            nursery.cancel_scope.cancel()
        batch_s = 0.4
        assert max(waited) <= CONFIG.max_wait_s + 2 * batch_s
        assert rig.node.recorder.queue_s["backward"].count > accepted_before
        assert rig.node.status()["busy"] > 100
        late = [hint for hint in hints[-100:] if hint is not None]
        assert len(late) == 100
        assert all(0.3 < hint <= CONFIG.max_wait_s / 2 for hint in late)


async def test_what_is_accepted_is_begun_in_time(autojump_clock: trio.testing.MockClock) -> None:
    """Whoever obeys the hint comes back when about half of the queue is done."""
    async with open_rig(cost=TENTH, config=CONFIG) as rig:
        await rig.forward("ffn.0.1", rows(4))
        times: list[float] = []

        async def ask() -> None:
            try:
                since = trio.current_time()
                await rig.forward("ffn.0.1", rows(4), timeout_s=60.0)
                times.append(trio.current_time() - since)
            except PeerBusy as busy:
                await trio.sleep(busy.retry_after_s or 60.0)
                await ask()

        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(ask)
        assert len(times) == 30
        assert max(times) < CONFIG.max_wait_s + 1.0
        # No batch waited while callers were sent away: 31 batches of 0.4 s, and little more.
        assert trio.current_time() < 31 * 0.4 + 1.5


@pytest.mark.parametrize(("head_start_s", "done"), [(0.1, ["forward"] + ["backward"] * 4), (0.0, None)])
async def test_forward_calls_go_ahead_of_backward_ones(head_start_s: float, done: Any, autojump_clock: Any) -> None:
    """With a head start, a forward call goes ahead of waiting backward calls to its expert, which become one batch."""
    config = NodeConfig(max_batch_rows=4, forward_head_start_s=head_start_s)
    async with open_rig(cost=TENTH, config=config) as rig:
        ended: list[str] = []

        async def ask(kind: str, number: int) -> None:
            await trio.sleep(0.01 * number)
            grads = [0 * rows(1)] if kind == "backward" else []
            await rig.call(f"expert.{kind}", {"uid": "ffn.0.1", "id": b"%d" % number}, rows(1), *grads)
            ended.append(kind)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.forward, "ffn.2.3", rows(4))
            for number, kind in enumerate(["backward", "backward", "forward", "backward", "backward"], start=1):
                nursery.start_soon(ask, kind, number)
        assert ended == (done or ["backward"] * 4 + ["forward"])


def test_a_head_start_is_a_number_of_seconds() -> None:
    """Without an end, backward calls could wait for ever."""
    for head_start_s in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="forward_head_start_s must be 0 or a number of seconds"):
            NodeConfig(forward_head_start_s=head_start_s)


def test_only_what_would_be_one_batch_may_wait() -> None:
    """Requests may wait if they would be one batch; a device that has something else to do does that."""
    assert queue_of(max_batch_rows=4).only_batch() == ()
    one = asked("a", 1, "a1"), asked("a", 3, "a2")
    assert queue_of(*one, max_batch_rows=4).only_batch() == one
    assert queue_of(*one, max_batch_rows=3).only_batch() == ()
    assert queue_of(*one, asked("b", 1), max_batch_rows=8).only_batch() == ()


async def mean_rows(cost_s: float, *, delay_s: float = 0.02) -> float:
    """Mean rows of a batch; eight callers of one row, who began at different times, come back after 12 ms."""
    config = NodeConfig(max_batch_rows=8, max_queue_delay_s=delay_s)
    async with open_rig(cost=CostModel(call_s=cost_s), config=config) as rig:
        ids, ends_at = itertools.count(), trio.current_time() + 100 * cost_s

        async def call(number: int) -> None:
            await trio.sleep(cost_s * number / 6)
            while trio.current_time() < ends_at:
                own = b"%d" % next(ids)
                await rig.forward("ffn.0.1", rows(1))
                await rig.backward("ffn.0.1", own, rows(1), 0 * rows(1))
                await trio.sleep(0.002)  # beside 10 ms on the way

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(call, number)
        status = rig.node.status()
        return status["rows"] / status["batches"]


@pytest.mark.slow
async def test_callers_of_one_large_expert_share_its_steps(autojump_clock: trio.testing.MockClock) -> None:
    """Callers who are back in a moment are soon served together, if the node waits and a batch is long."""
    assert await mean_rows(0.08) > 7.0
    assert await mean_rows(0.08, delay_s=0.0) < 6.0
    assert await mean_rows(0.079) < 6.0


async def test_it_waits_no_longer_than_the_delay(autojump_clock: trio.testing.MockClock) -> None:
    """A caller that does not come back in time delays one batch; those of one caller alone are not delayed."""
    async with open_rig(cost=CostModel(call_s=0.1), config=NodeConfig(max_queue_delay_s=0.02)) as rig:
        await rig.forward("ffn.0.1", rows(1))  # how long one row takes is known from now on
        took = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.forward, "ffn.2.3", rows(1))
            await trio.sleep(0.001)
            nursery.start_soon(rig.forward, "ffn.0.1", rows(1))
            nursery.start_soon(rig.forward, "ffn.0.1", rows(1))
        for number in range(10):
            kind, grads = ("backward", [0 * rows(1)]) if number % 2 else ("forward", [])
            started = trio.current_time()
            await rig.call(f"expert.{kind}", {"uid": "ffn.0.1", "id": b"%d" % number}, rows(1), *grads)
            took.append(trio.current_time() - started)
        assert took == pytest.approx([0.01 + 0.01 + 0.1] + [0.11] * 9)
