"""Experts of one node asked by one request: each part is answered, refused and given up by itself."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import cbor2
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.machine.device import CostModel, Device, InlineDevice
from dmoe_jax.mixture.expert_calls import BACKWARD, FORWARD, ExpertCall
from dmoe_jax.mixture.fan_out import REQUEST_BYTES, grouped
from dmoe_jax.mixture.remote import Choice, RemoteMixture, _add_rows
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.routing.product_key import product_key
from dmoe_net.errors import CallRefused, ConnectionLost, PeerBusy
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.wire.codec import encode
from dmoe_net.wire.compression import Compression
from tests.dmoe_jax.small_swarm import SmallSwarm, direct_callers, open_small_swarm
from tests.dmoe_jax.test_node_turns import TurnDevice
from tests.net.direct_network import DirectCaller, DirectNetwork

EXPERT = feedforward(d_model=4)
SGD = optax.sgd(0.1)
ROUTER = product_key(grid_size=(4,))
X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
NODE = Contact(PeerId(bytes(32)), Address("node", 1))


class Wire:
    """A trainer's caller that notes how often the node answers, and may lose the reply after the partials."""

    def __init__(self, caller: DirectCaller) -> None:
        self._caller = caller
        self.peer_id, self.address, self.health = caller.peer_id, caller.address, caller.health
        self.moved_bytes, self.bulk = caller.moved_bytes, caller.bulk
        self.is_reached, self.reach = caller.is_reached, caller.reach
        self.add_handler, self.remove_handler = caller.add_handler, caller.remove_handler
        self.bodies: list[Any] = []
        self.asked: list[list[str]] = []
        """The experts of each request."""
        self.said: list[list[int]] = []
        """The parts of each partial and reply."""
        self.loses_replies = 0
        self.spoils: Callable[[Reply], Reply] = lambda reply: reply

    async def call(
        self, target: Any, method: str, body: Any, tensors: Any = (), *, on_partial: Any = None, **options: Any
    ) -> Reply:
        if method not in (FORWARD, BACKWARD):
            return await self._caller.call(target, method, body, tensors, **options)
        self.bodies.append(body)
        self.asked.append([part["uid"] for part in body["parts"]])

        def take(reply: Reply) -> None:
            self.said.append([said["part"] for said in reply.body["answers"]])
            on_partial(reply)

        reply = await self._caller.call(target, method, body, tensors, on_partial=take, **options)
        self.said.append([said["part"] for said in reply.body["answers"]])
        if self.loses_replies:
            self.loses_replies -= 1
            raise ConnectionLost("the connection broke")
        return self.spoils(reply)


@asynccontextmanager
async def one_node(
    *, config: NodeConfig | None = None, device: Device | None = None, **options: Any
) -> AsyncIterator[tuple[SmallSwarm, RemoteMixture, Wire, Choice]]:
    """Four experts on one node, a second each a call; a mixture, its wire, and the choice that sends three samples to
    experts 0 to 2, the last of them to expert 3 as well."""
    node, trainer = direct_callers(DirectNetwork(latency_s=0.1), 2)
    wire = Wire(trainer)
    opened = open_small_swarm(
        [node, wire],
        EXPERT,
        SGD,
        prefixes=["ffn"],
        grid_size=(4,),
        node_config=config,
        device=device or InlineDevice(CostModel(call_s=1.0)),
    )
    async with opened as swarm:
        mixture = swarm.mixture(EXPERT, ROUTER, "ffn", k_best=4, **options)
        living = await mixture.living()
        every, last = np.arange(3), np.array([2])
        calls = tuple(
            ExpertCall(uid=f"ffn.{index}", contact=living[(index,)], rows=rows, slots=np.full(len(rows), index))
            for index, rows in enumerate((every, every, every, last))
        )
        yield swarm, mixture, wire, Choice(np.zeros((3, 4, 1), np.int32), calls)


async def test_parts_come_back_as_they_are_ready(autojump_clock: trio.testing.MockClock) -> None:
    """One request; each expert's second of work brings its answer, the first ahead of the last."""
    async with one_node(grace_s=60.0) as (swarm, mixture, wire, choice):
        ended: list[tuple[str, float]] = []
        started = trio.current_time()
        mixture._caller.on_call = lambda record: ended.append((record.uid, round(record.ended - started, 1)))
        outputs, answered, residual = await mixture.forward(choice, [X])
        assert wire.asked == [["ffn.0", "ffn.1", "ffn.2", "ffn.3"]]
        assert wire.said == [[0], [1], [2], [3]]
        assert ended == [("ffn.0", 1.1), ("ffn.1", 2.1), ("ffn.2", 3.1), ("ffn.3", 4.1)]
        assert answered.tolist() == [[True, True, True, False]] * 2 + [[True] * 4]
        for index in range(4):
            rows = [2] if index == 3 else [0, 1, 2]
            expected = swarm.backends[f"ffn.{index}"].forward([X[rows]])
            np.testing.assert_array_equal(outputs[rows, index], expected)
        await mixture.backward(residual, outputs)
        assert [backend.update_count for backend in swarm.backends.values()] == [1] * 4


@pytest.mark.parametrize("is_checked", [True, False])
async def test_a_node_gets_no_more_rows_in_a_call_than_it_takes(
    is_checked: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """Three rows for each of three experts at a node that takes two: it says so when it is checked, or when it is asked
    for more, which costs one refusal; all rows are answered, and each part of them trains once."""
    async with one_node(config=NodeConfig(max_batch_rows=2), grace_s=60.0, timeout_s=60.0) as (
        swarm,
        mixture,
        _,
        choice,
    ):
        if is_checked:
            await mixture.check()
            calls = [part for call in choice.calls for part in mixture._split(call)]
            choice = choice._replace(calls=tuple(calls))
        outputs, answered, residual = await mixture.forward(choice, [X])
        assert swarm.statistics.failures == ({} if is_checked else {"refused": 3})
        assert sorted(len(call.rows) for call in residual.answered) == [1, 1, 1, 1, 2, 2, 2]
        assert answered.tolist() == [[True, True, True, False]] * 2 + [[True] * 4]
        # Programs for one row, two and three round otherwise.
        np.testing.assert_allclose(outputs[[0, 1, 2], 0], swarm.backends["ffn.0"].forward([X]), rtol=1e-6, atol=1e-6)
        await mixture.backward(residual, outputs)
        assert {uid: backend.update_count for uid, backend in swarm.backends.items()} == {
            **dict.fromkeys(("ffn.0", "ffn.1", "ffn.2"), 2),
            "ffn.3": 1,
        }
        # From now on nothing is refused.
        first, there = np.zeros((3, 1, 1), np.int32), np.ones((3, 1), bool)
        grouped_ones = await mixture._grouped(first, there, await mixture.living())
        assert [len(call.rows) for call in grouped_ones.calls] == [2, 1]


async def test_what_is_said_of_the_parts_is_in_canonical_order(autojump_clock: trio.testing.MockClock) -> None:
    """So that the codec takes the shorter way, forward and backward, with dropout and with compression."""
    async with one_node(compression=Compression.FLOAT16) as (_, mixture, wire, choice):
        outputs, _, residual = await mixture.forward(choice, [X], dropout_seed=7)
        await mixture.backward(residual, outputs)
    assert [sorted(body) for body in wire.bodies] == [["compression", "dropout_seed", "parts"]] * 2
    assert [len(body["parts"][0]) for body in wire.bodies] == [3, 4]
    for body in wire.bodies:
        assert cbor2.dumps(body) == encode(body)


@pytest.mark.parametrize("rows", [[0, 1, 3], [3, 0, 1], [1, 1, 3], []])
def test_the_gradient_of_a_row_that_was_sent_twice_is_the_sum(rows: list[int]) -> None:
    """Rows that rise, rows in another order, and a row that an expert had twice."""
    sums, grads = np.ones((4, 2)), np.arange(2.0 * len(rows)).reshape(-1, 2)
    expected = sums.copy()
    for row, grad in zip(rows, grads, strict=True):
        expected[row] += grad
    _add_rows(sums, np.array(rows, int), grads)
    np.testing.assert_array_equal(sums, expected)


async def test_grace_counts_for_each_part(autojump_clock: trio.testing.MockClock) -> None:
    """With two answers a sample has enough; the grace time brings a third, and the fourth is given up."""
    async with one_node(k_min=2, grace_s=1.5) as (swarm, mixture, _, choice):
        _, answered, residual = await mixture.forward(choice, [X])
        assert answered.tolist() == [[True, True, True, False]] * 3
        assert [call.uid for call in residual.answered] == ["ffn.0", "ffn.1", "ffn.2"]
        assert (swarm.statistics.ok, swarm.statistics.failures) == (3, {"late": 1})
        await trio.sleep(5.0)
        status = swarm.nodes[0].status()
        given_up = swarm.nodes[0].recorder.calls["ffn.3", "forward", "given up"]
        assert (status["waiting_rows"], given_up) == (0, 1)
        # The node had begun it when it heard that nobody waits.
        assert status["answered"] == 4


async def test_a_part_that_finds_the_queue_full_comes_again_alone(autojump_clock: trio.testing.MockClock) -> None:
    """Nine rows may wait: three experts' of three samples. The fourth is asked for again until there is room."""
    config = NodeConfig(max_batch_rows=9, max_waiting_rows=9)
    async with one_node(config=config, grace_s=60.0) as (swarm, mixture, wire, choice):
        _, answered, _ = await mixture.forward(choice, [X])
        assert answered.tolist() == [[True, True, True, False]] * 2 + [[True] * 4]
        assert wire.asked[0] == ["ffn.0", "ffn.1", "ffn.2", "ffn.3"]
        assert set(map(tuple, wire.asked[1:])) == {("ffn.3",)}
        assert swarm.statistics.failures == {}
        assert swarm.statistics.asked_again == swarm.nodes[0].status()["busy"] == len(wire.asked) - 1 > 0


async def test_a_call_for_which_a_node_has_no_room_is_placed_again(autojump_clock: trio.testing.MockClock) -> None:
    """It serves one at a time and says no more than that it is busy: the second one comes again, later and later."""
    config = NodeConfig(max_concurrent_calls=1)
    async with one_node(config=config, grace_s=60.0) as (swarm, mixture, wire, choice):
        asked_at: list[float] = []
        call = wire.call

        async def noted(target: Any, method: str, *args: Any, **options: Any) -> Reply:
            if method == FORWARD:
                asked_at.append(trio.current_time())
            return await call(target, method, *args, **options)

        wire.call = noted  # type: ignore[method-assign]
        all_answered: list[bool] = []

        async def ask() -> None:
            _, answered, _ = await mixture.forward(choice, [X])
            all_answered.append(bool(answered[:, :3].all()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
        assert all_answered == [True, True]
        assert swarm.statistics.failures == {}
        pauses = np.diff(asked_at[1:]) - 0.1  # the way
        np.testing.assert_allclose(pauses, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
        assert swarm.statistics.asked_again == 4 * len(pauses)


async def test_a_call_for_which_there_is_never_room_fails_at_its_deadline(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its parts are lost, with the reason; nobody waits for longer than he meant to."""
    async with one_node(timeout_s=3.0, max_skipped=1.0) as (swarm, mixture, wire, choice):

        async def full(*args: Any, **options: Any) -> Reply:
            raise PeerBusy("4096 calls are running already")

        wire.call = full  # type: ignore[method-assign]
        began = trio.current_time()
        _, answered, _ = await mixture.forward(choice, [X])
        assert not answered.any()
        assert swarm.statistics.failures == {"busy": 4}
        assert trio.current_time() - began == pytest.approx(0.1 + 0.2 + 0.4 + 0.8 + 1.0)  # One more would be too late.


async def test_who_is_sent_away_for_too_long_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    """There is no time to come again: the call has failed."""
    config = NodeConfig(max_batch_rows=9, max_waiting_rows=9)
    async with one_node(config=config, grace_s=60.0, timeout_s=4.5) as (swarm, mixture, wire, choice):
        await mixture.forward(choice, [X])  # now it is known how long a row takes

        def patient(reply: Reply) -> Reply:
            answers = [{**said, "retry_after_s": 5.0} if "error" in said else said for said in reply.body["answers"]]
            return Reply(body={"answers": answers}, tensors=reply.tensors)

        wire.spoils = patient
        calls = choice.calls * 2  # the second three find the queue full
        _, answered, _ = await mixture.forward(Choice(choice.indices, calls), [X])
        assert answered[:, :3].all()
        assert swarm.statistics.failures["busy"] > 0
        assert all(mixture._caller.directory._is_busy(call.contact) for call in calls)


async def test_a_part_that_does_not_fit_is_refused_alone(autojump_clock: trio.testing.MockClock) -> None:
    """One names no expert of the node, one has NaN among its own rows; nobody answers for them."""
    async with one_node(grace_s=60.0) as (swarm, mixture, _, choice):
        calls = list(choice.calls)
        calls[1] = ExpertCall(uid="ffn.9", contact=calls[1].contact, rows=np.arange(2), slots=np.full(2, 1))
        for place in (0, 2):
            calls[place] = ExpertCall(
                uid=calls[place].uid, contact=calls[0].contact, rows=np.arange(2), slots=np.full(2, place)
            )
        broken = X.copy()
        broken[2] = np.nan  # only expert 3 is to get it
        _, answered, _ = await mixture.forward(Choice(choice.indices, tuple(calls)), [broken])
        assert answered.tolist() == [[True, False, True, False]] * 2 + [[False] * 4]
        assert swarm.statistics.failures == {"refused": 2}
        assert swarm.nodes[0].recorder.malformed == 2


async def test_a_retry_asks_only_for_what_is_missing(autojump_clock: trio.testing.MockClock) -> None:
    """The connection breaks behind three partials: the fourth part is asked for again, and trains once."""
    async with one_node(grace_s=60.0) as (swarm, mixture, wire, choice):
        outputs, _, residual = await mixture.forward(choice, [X])
        wire.asked.clear()
        wire.loses_replies = 1
        (grads,) = await mixture.backward(residual, outputs)
        assert wire.asked == [["ffn.0", "ffn.1", "ffn.2", "ffn.3"], ["ffn.3"]]
        assert swarm.nodes[0].status()["replayed"] == 1
        assert [backend.update_count for backend in swarm.backends.values()] == [1] * 4
        assert swarm.statistics.failures == {}
        assert grads is not None
        assert np.abs(grads[2]).sum() > 0


async def test_nothing_is_retried_later_than_it_is_remembered(autojump_clock: trio.testing.MockClock) -> None:
    """The connection breaks 80 s after the request: experts remember it for 60 s only, so nobody is asked again."""
    slow = InlineDevice(CostModel(call_s=20.0))
    options = {"grace_s": 300.0, "timeout_s": 300.0}
    async with one_node(device=slow, config=NodeConfig(max_wait_s=1000.0), **options) as (swarm, mixture, wire, choice):
        outputs, _, residual = await mixture.forward(choice, [X])
        wire.asked.clear()
        wire.loses_replies = 1
        await mixture.backward(residual, outputs)
        assert wire.asked == [["ffn.0", "ffn.1", "ffn.2", "ffn.3"]]
        assert [backend.update_count for backend in swarm.backends.values()] == [1] * 4
        assert swarm.statistics.failures == {"connection lost": 1}


async def test_what_came_ahead_of_a_bad_reply_counts(autojump_clock: trio.testing.MockClock) -> None:
    """A reply that speaks of a part twice is held against the experts that it leaves unanswered."""
    async with one_node(grace_s=60.0) as (swarm, mixture, wire, choice):
        wire.spoils = lambda reply: Reply(body={"answers": [*reply.body["answers"]] * 2}, tensors=reply.tensors)
        _, answered, _ = await mixture.forward(choice, [X])
        assert answered.tolist() == [[True, True, True, False]] * 3
        wire.spoils = lambda reply: Reply(body={"answers": []})
        _, answered, _ = await mixture.forward(choice, [X])
        assert swarm.statistics.failures == {"bad answer": 2}
        assert swarm.statistics.ok == 6


async def test_parts_that_are_ready_together_come_in_one_reply(autojump_clock: trio.testing.MockClock) -> None:
    """Those that share a turn of the device, once it is known how long they take: the reply brings them all."""
    async with one_node(device=TurnDevice(), grace_s=60.0) as (_, mixture, wire, choice):
        await mixture.forward(choice, [X])
        wire.said.clear()
        await mixture.forward(choice, [X])
        assert wire.said == [[0, 1, 2, 3]]


@pytest.mark.parametrize(("each_s", "said"), [(0.003, [[0, 1, 2, 3]]), (0.006, [[0, 1], [2, 3]])])
async def test_what_is_ready_waits_a_moment_for_the_rest(
    each_s: float, said: list[list[int]], autojump_clock: trio.testing.MockClock
) -> None:
    """Ten milliseconds from the first part that is ready, and then from the next one."""
    async with one_node(device=InlineDevice(CostModel(call_s=each_s)), grace_s=60.0) as (swarm, mixture, wire, choice):
        started = trio.current_time()
        outputs, answered, residual = await mixture.forward(choice, [X])
        assert trio.current_time() - started == pytest.approx(0.1 + 4 * each_s)
        assert wire.said == said
        assert answered.all(axis=1).tolist() == [False, False, True]
        wire.said.clear()
        with trio.move_on_after(0.05 + 2.5 * each_s):  # it is given up while its parts wait
            await mixture.backward(residual, outputs)
        await mixture.forward(choice, [X])
        assert wire.said == said
        assert swarm.statistics.failures == {}


async def test_what_is_refused_at_once_is_told_ahead_of_slow_parts(autojump_clock: trio.testing.MockClock) -> None:
    """Nothing else happens at the node meanwhile that would remind it."""
    async with one_node(device=InlineDevice(CostModel(call_s=60.0)), grace_s=600.0, timeout_s=600.0) as rig:
        _, _, wire, choice = rig
        body = {"parts": [{"uid": uid, "rows": 3} for uid in ("ffn.0", "nobody.0")]}
        came: list[tuple[list[int], float]] = []
        started = trio.current_time()

        def take(reply: Reply) -> None:
            came.append(([said["part"] for said in reply.body["answers"]], trio.current_time() - started))

        index = np.tile(np.arange(3, dtype=np.int32), 2)
        target = choice.calls[0].contact
        await wire._caller.call(target, FORWARD, body, (index, X), on_partial=take, timeout_s=600.0)
        assert came == [([1], pytest.approx(0.11))]


async def test_a_node_refuses_a_request_that_is_none(autojump_clock: trio.testing.MockClock) -> None:
    """With what is wrong, whoever sent it, and serves on."""
    async with one_node() as (swarm, mixture, wire, choice):
        handler = swarm.nodes[0].handlers[FORWARD]
        request = Request(method=FORWARD, body={"parts": []}, tensors=(X,), peer_id=wire.peer_id, peer_address=None)
        with pytest.raises(CallRefused, match="a request has parts"):
            await handler(request)
        _, answered, _ = await mixture.forward(choice, [X])
        assert answered[:, 0].all()


def test_calls_of_a_node_travel_together_up_to_a_size() -> None:
    """In their order; a larger one by itself; those of other nodes apart."""
    other = Contact(PeerId(b"o" * 32), Address("other", 1))

    def call(rows: int, contact: Contact = NODE) -> ExpertCall:
        return ExpertCall(uid="ffn.0", contact=contact, rows=np.arange(rows), slots=np.zeros(rows, np.int64))

    calls = [call(1), call(2, other), call(1), call(1), call(3, other)]
    assert grouped(calls, row_bytes=4, most=64) == [[0, 2, 3], [1, 4]]
    assert grouped(calls, row_bytes=4, most=2) == [[0, 2], [1, 4], [3]]
    assert grouped(calls, row_bytes=4, most=1) == [[0], [1], [2], [3], [4]]
    assert grouped(calls, row_bytes=REQUEST_BYTES // 4, most=64) == [[0, 2, 3], [1], [4]]
    assert grouped(calls, row_bytes=REQUEST_BYTES, most=64) == [[0], [1], [2], [3], [4]]
    assert grouped([], row_bytes=4, most=64) == []
