"""Experts of one node asked by one request: its form; each part is answered, refused and given up by itself."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import optax
import pytest
import trio

from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.machine.device import CostModel, Device, InlineDevice
from dmoe_jax.mixture import expert_calls
from dmoe_jax.mixture.expert_calls import BACKWARD, FORWARD, MAX_PARTS, Answer, ExpertCall, answer_of, index_of
from dmoe_jax.mixture.fan_out import REQUEST_BYTES, grouped
from dmoe_jax.mixture.remote import Choice, RemoteMixture
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.routing.product_key import product_key
from dmoe_net.errors import CallRefused, ConnectionLost, PeerBusy, RemoteFailure, RemoteProtocolError
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.wire.compression import Compression
from tests.dmoe_jax.small_swarm import SmallSwarm, direct_callers, identity_of, open_small_swarm
from tests.net.direct_network import DirectCaller, DirectNetwork

EXPERT = feedforward(d_model=4)
SGD = optax.sgd(0.1)
ROUTER = product_key(grid_size=(4,))
X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
NODE = Contact(PeerId(bytes(32)), Address("node", 1))
ALL_BUT_TWO = [[True, True, True, False]] * 2 + [[True] * 4]


class Wire(DirectCaller):
    """A trainer's caller that notes how often the node answers, and may lose the reply after the partials."""

    def __init__(self, network: DirectNetwork) -> None:
        super().__init__(network, None, identity_of(1).peer_id)
        self.asked: list[list[str]] = []
        """The experts of each request."""
        self.asked_at: list[float] = []
        self.said: list[list[int]] = []
        """The parts of each partial and reply."""
        self.loses_replies = 0
        self.spoils: Callable[[Reply], Reply] = lambda reply: reply

    async def call(
        self, target: Any, method: str, body: Any, tensors: Any = (), *, on_partial: Any = None, **options: Any
    ) -> Reply:
        if method not in (FORWARD, BACKWARD):
            return await super().call(target, method, body, tensors, **options)
        self.asked.append([part["uid"] for part in body["parts"]])
        self.asked_at.append(trio.current_time())

        def take(reply: Reply) -> None:
            self.said.append([said["part"] for said in reply.body["answers"]])
            on_partial(reply)

        reply = await super().call(target, method, body, tensors, on_partial=take, **options)
        self.said.append([said["part"] for said in reply.body["answers"]])
        if self.loses_replies:
            self.loses_replies -= 1
            raise ConnectionLost("the connection broke")
        return self.spoils(reply)


@asynccontextmanager
async def one_node(
    *, config: NodeConfig | None = None, device: Device | None = None, **options: Any
) -> AsyncIterator[tuple[SmallSwarm, RemoteMixture, Wire, Choice]]:
    """Four experts on one node, a second each a call; a mixture, its wire, and what is `chosen`."""
    network = DirectNetwork(latency_s=0.1)
    node, wire = direct_callers(network, 2)[0], Wire(network)
    grid = {"prefixes": ["ffn"], "grid_size": (4,)}
    device = device or InlineDevice(CostModel(call_s=1.0))
    async with open_small_swarm([node, wire], EXPERT, SGD, **grid, node_config=config, device=device) as swarm:
        mixture = swarm.mixture(EXPERT, ROUTER, "ffn", k_best=4, **options)
        yield swarm, mixture, wire, await chosen(mixture)


async def chosen(mixture: RemoteMixture) -> Choice:
    """The choice of three samples: all of them for experts 0 to 2, the last for expert 3 as well."""
    indices = np.tile(np.arange(4, dtype=np.int32)[:, None], (3, 1, 1))
    return await mixture.choose_selected(indices, np.array(ALL_BUT_TWO), await mixture.alive())


async def test_parts_come_back_as_they_are_ready(autojump_clock: trio.testing.MockClock) -> None:
    """One request; each expert's second of work brings its answer, the first ahead of the last."""
    async with one_node(grace_s=60.0) as (swarm, mixture, wire, choice):
        ended: list[tuple[str, float]] = []
        started = trio.current_time()
        swarm.swarm.watch_calls(lambda record: ended.append((record.uid, round(record.ended - started, 1))))
        outputs, answered, residual = await mixture.forward(choice, [X])
        assert wire.asked == [["ffn.0", "ffn.1", "ffn.2", "ffn.3"]]
        assert wire.said == [[0], [1], [2], [3]]
        assert ended == [("ffn.0", 1.1), ("ffn.1", 2.1), ("ffn.2", 3.1), ("ffn.3", 4.1)]
        assert answered.tolist() == ALL_BUT_TWO
        for index in range(4):
            rows = [2] if index == 3 else [0, 1, 2]
            expected = swarm.backends[f"ffn.{index}"].forward([X[rows]])
            np.testing.assert_array_equal(outputs[rows, index], expected)
        await mixture.backward(residual, outputs)
        assert [backend.update_count for backend in swarm.backends.values()] == [1] * 4


@pytest.mark.parametrize("is_checked", [True, False])
async def test_a_node_gets_no_more_rows_in_a_call_than_it_takes(is_checked: bool, autojump_clock: Any) -> None:
    """A node that takes two rows says so when it is checked or refuses three; then all rows are answered."""
    config = NodeConfig(max_batch_rows=2)
    async with one_node(config=config, grace_s=60.0, timeout_s=60.0) as (swarm, mixture, _, choice):
        if is_checked:
            await mixture.check()
            choice = await chosen(mixture)
        outputs, answered, residual = await mixture.forward(choice, [X])
        assert swarm.statistics.failures == ({} if is_checked else {"refused": 3})
        assert sorted(len(call.rows) for call in residual.answered) == [1, 1, 1, 1, 2, 2, 2]
        assert answered.tolist() == ALL_BUT_TWO
        # Programs for one row, two and three round otherwise.
        np.testing.assert_allclose(outputs[[0, 1, 2], 0], swarm.backends["ffn.0"].forward([X]), rtol=1e-6, atol=1e-6)
        await mixture.backward(residual, outputs)
        assert [swarm.backends[f"ffn.{index}"].update_count for index in range(4)] == [2, 2, 2, 1]
        # From now on nothing is refused.
        assert [len(call.rows) for call in (await chosen(mixture)).calls] == [2, 1, 2, 1, 2, 1, 1]


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
        assert answered.tolist() == ALL_BUT_TWO
        assert wire.asked[0] == ["ffn.0", "ffn.1", "ffn.2", "ffn.3"]
        assert set(map(tuple, wire.asked[1:])) == {("ffn.3",)}
        assert swarm.statistics.failures == {}
        assert swarm.statistics.asked_again == swarm.nodes[0].status()["busy"] == len(wire.asked) - 1 > 0


async def test_a_call_for_which_a_node_has_no_room_is_placed_again(autojump_clock: trio.testing.MockClock) -> None:
    """It serves one at a time and says no more than that it is busy: the second one comes again, later and later."""
    config = NodeConfig(max_concurrent_calls=1)
    async with one_node(config=config, grace_s=60.0) as (swarm, mixture, wire, choice):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mixture.forward, choice, [X])
            nursery.start_soon(mixture.forward, choice, [X])
        assert (swarm.statistics.ok, swarm.statistics.failures) == (8, {})
        pauses = np.diff(wire.asked_at[1:]) - 0.1  # the way
        np.testing.assert_allclose(pauses, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
        assert swarm.statistics.asked_again == 4 * len(pauses)


async def test_a_call_without_room_fails_at_its_deadline(autojump_clock: trio.testing.MockClock) -> None:
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
        assert all(swarm.directory._is_busy(call.contact) for call in calls)


async def test_a_part_that_does_not_fit_is_refused_alone(autojump_clock: trio.testing.MockClock) -> None:
    """One names no expert of the node, one has NaN among its own rows; nobody answers for them."""
    async with one_node(grace_s=60.0) as (swarm, mixture, _, choice):
        first = [replace(call, rows=call.rows[:2], slots=call.slots[:2]) for call in choice.calls[:3]]
        calls = [first[0], replace(first[1], uid="ffn.9"), first[2], choice.calls[3]]
        broken = X.copy()
        broken[2] = np.nan  # only expert 3 is to get it
        _, answered, _ = await mixture.forward(Choice(choice.indices, tuple(calls)), [broken])
        assert answered.tolist() == [[True, False, True, False]] * 2 + [[False] * 4]
        assert swarm.statistics.failures == {"refused": 2}
        assert swarm.nodes[0].recorder.malformed == 2


@pytest.mark.parametrize("call_s", [pytest.param(1.0, marks=pytest.mark.slow), 20.0])
async def test_a_retry_asks_only_for_what_is_missing(call_s: float, autojump_clock: trio.testing.MockClock) -> None:
    """The connection breaks behind three partials: the fourth part is asked for again, and trains once. It is not 80 s
    after the request, of which experts remember 60."""
    patient: dict[str, Any] = {"config": NodeConfig(max_wait_s=1000.0), "grace_s": 300.0, "timeout_s": 300.0}
    async with one_node(device=InlineDevice(CostModel(call_s=call_s)), **patient) as (swarm, mixture, wire, choice):
        outputs, _, residual = await mixture.forward(choice, [X])
        wire.asked.clear()
        wire.loses_replies = 1
        (grads,) = await mixture.backward(residual, outputs)
        is_retried = call_s == 1.0
        assert wire.asked == [["ffn.0", "ffn.1", "ffn.2", "ffn.3"], ["ffn.3"]][: 1 + is_retried]
        assert swarm.nodes[0].status()["replayed"] == is_retried
        assert [backend.update_count for backend in swarm.backends.values()] == [1] * 4
        assert swarm.statistics.failures == ({} if is_retried else {"connection lost": 1})
        assert grads is not None
        assert np.abs(grads[2]).sum() > 0


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


@pytest.mark.parametrize(("each_s", "said"), [(0.003, [[0, 1, 2, 3]]), (0.006, [[0, 1], [2, 3]])])
async def test_what_is_ready_waits_a_moment_for_the_rest(each_s: float, said: Any, autojump_clock: Any) -> None:
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
        came: list[float] = []
        started = trio.current_time()

        def take(reply: Reply) -> None:
            came.append(trio.current_time() - started)

        tensors = np.tile(np.arange(3, dtype=np.int32), 2), X
        await wire.call(choice.calls[0].contact, FORWARD, body, tensors, on_partial=take, timeout_s=600.0)
        assert (wire.said, came) == ([[1], [0]], [pytest.approx(0.11)])


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


def request_of(parts: Any, *tensors: np.ndarray) -> Request:
    body, sender = {"parts": parts}, PeerId(bytes(32))
    return Request(method="expert.forward", body=body, tensors=tensors, peer_id=sender, peer_address=None)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_row_that_several_parts_take_travels_once() -> None:
    """The parts find theirs by the index, in their own order, a row that is asked for twice included."""
    batch, rng = np.arange(40.0).reshape(20, 2), np.random.default_rng(0)
    for _ in range(50):
        wanted = [rng.integers(0, 20, size=rng.integers(1, 9)) for _ in range(3)]
        distinct, index = index_of(wanted)
        assert len(distinct) == len({int(row) for rows in wanted for row in rows})
        request = request_of([{"rows": len(rows)} for rows in wanted], index, batch[distinct])
        parts = expert_calls.parts_of_untrusted(request)
        for wanted_rows, (_, _, rows) in zip(wanted, parts, strict=True):
            np.testing.assert_array_equal(batch[distinct][rows], batch[wanted_rows])
        pairs = np.concatenate([np.arange(len(index))[own] for _, own, _ in parts])
        np.testing.assert_array_equal(pairs, np.arange(len(index)))


ZEROS = np.zeros((3, 2), np.float32)
PART = {"uid": "ffn.0", "rows": 2}


@pytest.mark.parametrize(
    ("parts", "tensors", "message"),
    [
        (None, (int32(0, 1), ZEROS), "parts must be a list of at most 64, got None"),
        ([], (int32(), ZEROS), "a request has parts"),
        ([PART], (), "the index as its first tensor"),
        ([PART] * (MAX_PARTS + 1), (int32(0, 1), ZEROS), "parts must be a list of at most 64"),
        ([PART, 7], (int32(0, 1), ZEROS), "part 1 must be a map, got 7"),
        ([{"uid": "ffn.0"}], (int32(0, 1), ZEROS), "rows of part 0 must be an integer from 0 to .* got None"),
        ([{"rows": -1}], (int32(0, 1), ZEROS), "rows of part 0 must be an integer"),
        ([{"rows": True}], (int32(0), ZEROS), "rows of part 0 must be an integer"),
        ([PART], (int32(0, 1, 2), ZEROS), r"the index must be int32\[2\], .* got int32\[3\]"),
        ([PART, PART], (int32(0, 1, 2), ZEROS), r"the index must be int32\[4\]"),
        ([PART], (np.array([0, 1]), ZEROS), "got int64"),
        ([PART], (int32(0, 1).reshape(1, 2), ZEROS), r"got int32\[1, 2\]"),
        ([PART], (int32(0, 3), ZEROS), "within the 3 rows of the inputs"),
        ([PART], (int32(0, -1), ZEROS), "within the 3 rows"),
        ([PART], (int32(0, 1),), "within the 0 rows"),
        ([PART], (int32(0, 1), np.array(1.0)), "within the 0 rows"),
    ],
)
def test_requests_that_do_not_fit(parts: Any, tensors: Any, message: str) -> None:
    expert_calls.parts_of_untrusted(request_of([PART], int32(0, 1), ZEROS))
    with pytest.raises(RemoteProtocolError, match=message):
        expert_calls.parts_of_untrusted(request_of(parts, *tensors))


def test_an_answer_says_what_became_of_each_part() -> None:
    """Each part that the answer speaks of comes back as it was; errors keep their kind and their words."""
    first, last = np.array([[1.0], [2.0]]), np.array([[3.0]])
    errors = {1: CallRefused("no \ud800"), 2: PeerBusy("full"), 3: RemoteFailure("x" * 2000)}
    outcomes: list[Any] = [(4, Answer(updates=7, tensors=(last, last[:, 0]))), *errors.items()]
    outcomes.append((0, Answer(updates=None, tensors=(first, first[:, 0]))))
    answer = answer_of(outcomes, Compression.NONE)
    got = dict(expert_calls.outcomes_of_untrusted(answer, {0: 2, 1: 5, 2: 1, 3: 1, 4: 1, 9: 1}))
    assert list(got) == [4, 1, 2, 3, 0]
    for number, tensor in ((0, first), (4, last)):
        outcome = got[number]
        assert isinstance(outcome, Answer)
        np.testing.assert_array_equal(outcome.tensors[0], tensor)
        np.testing.assert_array_equal(outcome.tensors[1], tensor[:, 0])
    assert (got[4].updates, got[0].updates) == (7, None)  # type: ignore[union-attr]
    assert {number: type(got[number]) for number in errors} == {number: type(error) for number, error in errors.items()}
    assert [str(got[number]) for number in errors] == ["no ?", "full", "x" * 1000]


OK = {"part": 0, "updates": 1}


@pytest.mark.parametrize(
    ("answers", "tensors", "message"),
    [
        (None, (ZEROS,), "answers must be a list"),
        ([7], (ZEROS,), "expected the number of a part that waits for its answer, got None"),
        ([{"part": 5, "updates": 1}], (ZEROS,), "got 5"),
        ([{"part": True, "updates": 1}], (ZEROS,), "got True"),
        ([OK, OK], (np.zeros((6, 2)),), "got 0"),
        ([OK], (ZEROS[:2],), r"expected 3 rows in each tensor of an answer, got the shapes \[2, 2\]"),
        ([OK], (ZEROS, np.array(1.0)), r"got the shapes \[3, 2\], \[\]"),
        ([], (ZEROS,), "expected 0 rows"),
        ([{"part": 0, "updates": -1}], (ZEROS,), "updates must be an integer from 0"),
        ([{"part": 0, "error": "asleep", "message": ""}], (), "error must be one of busy, failure, refused"),
        ([{"part": 0, "error": "busy"}], (), "message must be a string"),
    ],
)
def test_answers_that_do_not_fit(answers: Any, tensors: Any, message: str) -> None:
    expected = {0: 3, 1: 1}
    expert_calls.outcomes_of_untrusted(Reply(body={"answers": [OK]}, tensors=(ZEROS,)), expected)
    with pytest.raises(RemoteProtocolError, match=message):
        expert_calls.outcomes_of_untrusted(Reply(body={"answers": answers}, tensors=tensors), expected)
    assert expected == {0: 3, 1: 1}
