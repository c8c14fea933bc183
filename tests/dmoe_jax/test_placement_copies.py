"""Copies of experts share the load and average, one may die unnoticed, and a retry trains nothing twice."""

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import jax
import numpy as np
import optax
import pytest
import trio
from trio.testing import MockClock

from dmoe_jax.experts import expert_from_functions
from dmoe_jax.machine.device import CostModel, InlineDevice
from dmoe_jax.mixture.expert_calls import BACKWARD
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.queue import name_of
from dmoe_jax.peers.peer import SIM_PORT
from dmoe_jax.placement.learnt import LEARNT, LearntNames, packed
from dmoe_jax.routing.base import Scores
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.swarm import Swarm
from dmoe_net.errors import CallRefused
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.transport.sim import HostDown, HostUp
from tests.dmoe_jax.node_rig import ask_expert, open_rig, rows
from tests.dmoe_jax.placement_swarm import ENTRANCE, World, in_world
from tests.net.direct_network import DirectCaller, DirectNetwork

NUM_EXPERTS = 8
EXPERT = expert_from_functions(
    lambda key: jax.random.normal(key, (4, 4)) / 2,
    lambda params, x: x + x @ params,
    np.zeros((1, 4), np.float32),
    name="linear",
)
ADAM = optax.adam(1e-3)
"""One object, so that what one test compiles serves the others."""
PERIOD_S = 10.0
TIMEOUT_S = 6.0


class Load:
    """A trainer that sends gradients of random batches, step after step, and keeps count of what it gets."""

    def __init__(self, swarm: Swarm, seed: int) -> None:
        self.swarm, self.steps, self._rng = swarm, 0, np.random.default_rng(seed)
        self.dead: list[tuple[float, int]] = []  # when how few experts were alive
        self.mixture = swarm.mixture("ffn", EXPERT, product_key((NUM_EXPERTS,)), k_best=2, k_min=2)

    async def run(self, until: float) -> None:
        while trio.current_time() < until:
            batch = [self._rng.normal(size=(2, 4)).astype(np.float32)]
            logits = self._rng.normal(size=(2, NUM_EXPERTS)).astype(np.float32)
            living = len(await self.mixture.living())
            if living < NUM_EXPERTS:
                self.dead.append((trio.current_time(), living))
            outputs, _, residual = await self.mixture.forward(await self.mixture.choose(Scores((logits,))), batch)
            await self.mixture.backward(residual, outputs / outputs.size)
            self.steps += 1
            await trio.sleep(1.0)

    @property
    def lost(self) -> int:
        """Calls that brought nothing, late ones too."""
        return self.swarm.statistics.failed + self.swarm.statistics.late


class Scene:
    """Nodes that serve the same experts, and some trainers."""

    def __init__(self, world: World, options: dict[str, Any]) -> None:
        self.world, self.options = world, options
        self.loads: list[Load] = []

    async def start(self, *hosts: str, **options: Any) -> None:
        """Start nodes, and wait until they serve."""
        # A hundredth of a second for each batch.
        options = {"device": lambda: InlineDevice(CostModel(call_s=0.01))} | self.options | options
        for host in hosts:
            self.world.start(host, {f"ffn.[0:{NUM_EXPERTS}]": EXPERT}, **options)
        await self.world.until(lambda: set(hosts) <= self.world.served.keys(), within_s=60)

    async def train(self, seconds: float) -> None:
        async with trio.open_nursery() as nursery:
            for load in self.loads:
                nursery.start_soon(load.run, trio.current_time() + seconds)

    async def after_round(self) -> None:
        """Wait until the next round of averages is over."""
        await trio.sleep_until((trio.current_time() // PERIOD_S + 1) * PERIOD_S + 9.0)

    def updates(self, host: str, uid: str | None = None) -> int:
        """Updates of an expert, or of all of them, at a host."""
        backends = self.world.served[host].backends
        return sum(backends[each].update_count for each in ([uid] if uid else backends))

    def rows(self, host: str) -> int:
        return self.world.served[host].node.status()["rows"]


@asynccontextmanager
async def scene(world: World, *hosts: str, trainers: int = 3, **options: Any) -> AsyncIterator[Scene]:
    """The nodes start at once; the block begins when all serve. Options are those of `World.start`."""
    period = {"replicas": 2, "average_period_s": PERIOD_S, "average_timeout_s": TIMEOUT_S}
    it = Scene(world, {"optimizer": ADAM, **period, **options})
    await it.start(*hosts)
    async with AsyncExitStack() as stack:
        for number in range(trainers):
            client = open_swarm(ENTRANCE, listen=None, network=world.network, host=f"trainer{number}", seed=number)
            it.loads.append(Load(await stack.enter_async_context(client), number))
            await it.loads[-1].mixture.check()
        yield it


def as_test(run: Callable[..., None]) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Make a synchronous test of an async one, whose first argument `run(test)` gives it."""

    def decorate(body: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**parameters: Any) -> None:
            run(functools.partial(body, **parameters))

        _, *others = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return test

    return decorate


def on_stage(*hosts: str, **options: Any) -> Callable[..., Any]:
    """Make a test of an async one that is given a `Scene` in virtual time, with these nodes; options as of `scene`."""

    async def play(body: Callable[[Scene], Awaitable[None]], world: World) -> None:
        async with scene(world, *hosts, **options) as it:
            await body(it)

    return as_test(lambda body: in_world(functools.partial(play, body), latency_s=0.02))


@pytest.mark.slow
@on_stage("a", "b")
async def test_two_nodes_share_the_load_average_and_one_dies_unnoticed(it: Scene) -> None:
    """Trainers lose the calls that were under way; the one that died returns with what was learnt meanwhile."""
    world = it.world
    await it.train(30.0)
    # Three trainers prefer one of two nodes for each of eight experts: a share of 0.5, with a deviation of 0.1.
    assert 0.2 <= it.rows("a") / (it.rows("a") + it.rows("b")) <= 0.8
    assert [load.lost for load in it.loads] == [0, 0, 0]
    await it.after_round()
    # An average of float32 that is added as a difference is exact to a rounding or two of numbers of order 1: 1e-6.
    world.check_agree("a", "b")
    assert world.copies("b")["averages"] >= 4 * NUM_EXPERTS, "one in each of the four rounds"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(it.train, 60.0)
        await trio.sleep(5.0)
        world.network.apply(HostDown("a", silent=True))
        await trio.sleep(15.0)  # the time-out of a call, and some
        lost, steps, updates = [load.lost for load in it.loads], [load.steps for load in it.loads], it.updates("b")
        assert all(1 <= each <= 4 for each in lost), "what a step asks of it at most, once"
        await trio.sleep(40.0)  # until after the announcements of the dead one have ended
        assert [load.lost for load in it.loads] == lost
        assert all(load.steps > before + 20 for load, before in zip(it.loads, steps, strict=True))
        assert it.updates("b") > updates + 100
    assert [load.dead for load in it.loads] == [[], [], []], "every expert was alive all the time"

    averages, updates = world.copies("b")["averages"], it.updates("b")
    world.network.apply(HostUp("a"))
    await world.until(lambda: "a" in world.served, within_s=30)
    assert world.said["a"] == [f"{NUM_EXPERTS} of {NUM_EXPERTS} experts begin as copies of those that others serve"]
    assert (it.updates("a"), world.copies("b")["given"]) == (updates, NUM_EXPERTS), "nobody sent a gradient meanwhile"
    world.check_agree("a", "b")
    await it.train(30.0)
    assert it.rows("a") > 0, "it has its share again"
    await it.after_round()
    world.check_agree("a", "b")
    assert world.copies("b")["averages"] >= averages + 3 * NUM_EXPERTS


@on_stage("a", "b")
async def test_an_average_in_which_one_dies_leaves_the_other_as_it_was(it: Scene) -> None:
    """The one that is left counts it with its reason, and averages no more until there is somebody again."""
    await it.train(3.0)
    before, replicas = it.world.numbers("b"), it.world.replicas("b")
    while not replicas.averager._all_reduce.groups.at_work:  # noqa: ASYNC110 (nothing tells of it)
        await trio.sleep(0.001)
    it.world.network.apply(HostDown("a", silent=True))
    await it.after_round()
    jax.tree.map(np.testing.assert_array_equal, it.world.numbers("b"), before)
    copies = it.world.copies("b")
    assert (copies["averages"], copies["failed"]["another copy was lost"]) == (0, NUM_EXPERTS)
    assert replicas.facts()["averages_failed"] >= NUM_EXPERTS


@on_stage("a", "b", trainers=1, average_period_s=600.0)
async def test_a_backward_goes_where_its_forward_went_and_elsewhere_when_that_node_is_gone(it: Scene) -> None:
    """The other copy learns in its place, and takes the gradient for fresh though it has taken more updates."""
    load = it.loads[0]
    await it.train(20.0)
    living = await load.mixture.living()
    theirs = next(index for (index,), contact in living.items() if contact.address.host == "a")
    uid, logits, batch = f"ffn.{theirs}", np.full((1, NUM_EXPERTS), -9.0, np.float32), np.ones((1, 4), np.float32)
    logits[0, theirs] = 9.0
    alone = load.swarm.mixture("ffn", EXPERT, product_key((NUM_EXPERTS,)), k_best=1)

    async def forward() -> Any:
        return (await alone.forward(await alone.choose(Scores((logits,))), [batch]))[2]

    residual, counts = await forward(), [it.updates(name, uid) for name in ("a", "b")]
    await alone.backward(residual, np.ones((1, 1, 4), np.float32))
    assert [it.updates(name, uid) for name in ("a", "b")] == [counts[0] + 1, counts[1]]

    backend = it.world.served["b"].backends[uid]
    for _ in range(3):  # b is three updates further than what a's forward will say
        backend.backward([batch], np.zeros((1, 4), np.float32))
    residual = await forward()
    weights, staleness, updates = np.array(backend.params), backend.staleness_total, backend.update_count
    it.world.network.apply(HostDown("a"))
    await trio.sleep(1.0)
    (gradient,) = await alone.backward(residual, np.ones((1, 1, 4), np.float32))
    # d(x + x W)/dx applied to ones: 1 + the sums of the rows of W, at b's copy.
    np.testing.assert_allclose(gradient, (1 + weights.sum(axis=1))[None], atol=1e-5)
    assert (backend.update_count, backend.staleness_total) == (updates + 1, staleness)
    assert (load.swarm.statistics.moved, load.lost) == (1, 0)


@on_stage("a", "b", trainers=0)
async def test_one_that_serves_without_replicating_is_named_and_left_alone(
    it: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies take no state of it and do not average with it, and say why; if it comes later it says whom it harms."""
    world = it.world
    await it.start("plain", replicas=1)
    assert "replicas" not in world.served["plain"].node.status()
    (warning,) = [text for text in caplog.messages if "by other nodes as well" in text]
    for part in ("8 experts", "ffn.0 (", "--replicas 2"):
        assert part in warning
    await it.after_round()
    assert world.copies("a")["averages"] >= NUM_EXPERTS, "those that replicate average without it"
    for host in ("a", "b"):
        world.network.apply(HostDown(host))
    await trio.sleep(35.0)  # their announcements end
    await it.start("late")
    assert world.said["late"] == [f"0 of {NUM_EXPERTS} experts begin as copies of those that others serve"]
    assert world.copies("late")["not_taken"] == {"it gives none": NUM_EXPERTS}
    await it.after_round()
    copies = world.copies("late")
    assert (copies["averages"], set(copies["failed"])) == (0, {"no other copy takes part"})


SGD = optax.sgd(0.5)
UID = "ffn.3"
KNOWN = "has learnt from this request before"


async def backward(it: Scene, host: str, request_id: bytes = b"one") -> None:
    """A trainer's call: the expert is linear, and takes 0.5 off each of its numbers."""
    ones, node, body = np.ones((1, 4), np.float32), Address(host, SIM_PORT), {"uid": UID, "id": request_id}
    await ask_expert(it.loads[0].swarm.peer.rpc, node, BACKWARD, body, ones, ones, timeout_s=5.0)


def weights(it: Scene, host: str) -> np.ndarray:
    return np.array(it.world.served[host].backends[UID].params)


@on_stage("a", "b", trainers=1, optimizer=SGD)
async def test_a_retry_at_another_copy_is_known_there_once_the_average_is(it: Scene) -> None:
    """Before the average a copy that has not learnt from a request may; after it the retry is refused."""
    before = weights(it, "a")
    await backward(it, "a")
    await backward(it, "a", b"two")
    await backward(it, "b", b"two")  # as if a's answer had been lost
    np.testing.assert_allclose(weights(it, "a"), before - 1.0, atol=1e-6)
    np.testing.assert_allclose(weights(it, "b"), before - 0.5, atol=1e-6)
    await it.after_round()
    it.world.check_agree("a", "b")
    mean = weights(it, "b")  # two updates and one: by two thirds a's
    np.testing.assert_allclose(mean, before - (2 * 1.0 + 0.5) / 3, atol=1e-6)
    for host, request_id in (("a", b"one"), ("a", b"two"), ("b", b"two")):
        await backward(it, host, request_id)  # answered from memory
    with pytest.raises(CallRefused, match=KNOWN):
        await backward(it, "b", b"one")
    for host in ("a", "b"):
        np.testing.assert_array_equal(weights(it, host), mean)
    await backward(it, "b", b"three")
    np.testing.assert_allclose(weights(it, "b"), mean - 0.5, atol=1e-6)


@on_stage("a", trainers=1, optimizer=SGD, average_period_s=600.0)
async def test_a_newcomer_knows_what_the_state_that_it_takes_was_learnt_from(it: Scene) -> None:
    """It refuses a retry of what is in its state, and learns from what is not; fetched states make room at once."""
    await backward(it, "a")
    with trio.fail_after(8.0):
        await it.start("c")
    taken = weights(it, "c")
    np.testing.assert_array_equal(taken, weights(it, "a"))
    with pytest.raises(CallRefused, match=KNOWN):
        await backward(it, "c")
    np.testing.assert_array_equal(weights(it, "c"), taken)
    await backward(it, "c", b"another")
    np.testing.assert_allclose(weights(it, "c"), taken - 0.5, atol=1e-6)


@pytest.mark.parametrize("lies", [True, False], ids=["lies", "is silent"])
@on_stage("a", "b", trainers=1, optimizer=SGD)
async def test_an_average_of_which_it_is_not_known_what_was_learnt_is_not_used(it: Scene, lies: bool) -> None:
    """The copy that was told nothing of use keeps what it has, and counts why; the other one, which was, averages."""
    await backward(it, "a")
    before, names_of_a = it.world.numbers("b"), it.world.replicas("a").averager.learnt
    honest = names_of_a.offer

    def offer(group_id: bytes, names: Sequence[Sequence[bytes]]) -> None:
        if lies:
            honest(group_id, names[1:])

    names_of_a.offer = offer  # type: ignore[method-assign]
    await it.after_round()
    jax.tree.map(np.testing.assert_array_equal, it.world.numbers("b"), before)
    copies, reason = it.world.copies("b"), "another copy did not say what it has learnt from"
    assert (copies["averages"], copies["failed"]) == (0, {reason: NUM_EXPERTS})
    assert it.world.copies("a")["averages"] == NUM_EXPERTS
    names_of_a.offer = honest  # type: ignore[method-assign]
    await it.after_round()
    assert it.world.copies("b")["averages"] == NUM_EXPERTS
    with pytest.raises(CallRefused, match=KNOWN):
        await backward(it, "b")


async def test_a_request_that_waits_while_its_name_arrives_is_refused(autojump_clock: MockClock) -> None:
    """When two requests wait to be one batch, the expert learns only from the one that it does not know."""
    uid, outcomes = "ffn.0.1", dict[bytes, str]()
    async with open_rig(cost=CostModel(call_s=1.0), config=NodeConfig(max_batch_rows=4)) as rig:

        async def ask(request_id: bytes) -> None:
            try:
                await rig.backward(uid, request_id, rows(1), rows(1))
            except CallRefused as refused:
                outcomes[request_id] = str(refused)
            else:
                outcomes[request_id] = "learnt"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.forward, "ffn.2.3", rows(4))
            await trio.sleep(0.1)
            for request_id in (b"known", b"new"):
                nursery.start_soon(ask, request_id)
            await trio.sleep(0.1)
            name = name_of(rig.trainer.peer_id.raw, uid, b"known")
            rig.backends[uid].learnt_elsewhere([name], trio.current_time())
        assert outcomes[b"new"] == "learnt"
        assert KNOWN in outcomes[b"known"]
        assert rig.backends[uid].update_count == 1
        with trio.fail_after(5.0):  # it holds up nobody who waits until the expert has no work any more
            await rig.node.give_up(uid)


INT, NAMES = np.int64, np.zeros((3, 16), np.uint8)
WRONG: dict[str, tuple[Any, ...]] = {
    "nothing": (),
    "no names": (np.array([1, 2], INT),),
    "counts of another type": (np.array([1.0, 2.0]), NAMES),
    "fewer than nothing": (np.array([-1, 4], INT), NAMES),
    "more than there are": (np.array([1, 3], INT), NAMES),
    "of another number of experts": (np.array([1, 1, 1], INT), NAMES),
    "longer names": (np.array([1, 2], INT), np.zeros((3, 17), np.uint8)),
    "too many": (np.array([0, 65537], INT), np.zeros((65537, 16), np.uint8)),
}

GROUP = bytes(16)


def callers(*names: str) -> list[DirectCaller]:
    """Peers of one network, at the addresses of their names."""
    network = DirectNetwork()
    return [network.caller(Address(name, 1), PeerId(name.ljust(32).encode())) for name in names]


async def asked(asking: DirectCaller, *others: DirectCaller, num_experts: int = 2) -> Any:
    """The requests that others say they have learnt from, and those who say nothing of use."""
    contacts = [Contact(each.peer_id, each.address) for each in others if each.address is not None]
    return await LearntNames(asking, timeout_s=10.0).of_others(GROUP, contacts, num_experts)


@pytest.mark.parametrize("tensors", WRONG.values(), ids=WRONG)
async def test_what_strangers_say_is_checked(tensors: tuple[Any, ...], autojump_clock: MockClock) -> None:
    """A peer that answers nonsense has said nothing; the names of the others are taken all the same."""

    async def nonsense(request: Request) -> Reply:
        return Reply(tensors=tensors)

    async def ask() -> None:
        assert await asked(asking, honest, liar) == ([[], [name]], {liar.peer_id})

    asking, honest, liar = callers("asking", "honest", "liar")
    others, name = LearntNames(honest, timeout_s=10.0), bytes(range(16))
    honest.add_handler(LEARNT, others.serve)
    liar.add_handler(LEARNT, nonsense)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(1.0)
        others.offer(GROUP, [[], [name]])  # it is waited for


async def test_nobody_waits_for_ever_for_an_average_that_is_not_made(autojump_clock: MockClock) -> None:
    """Strangers could fill the places of the method with groups that they make up."""
    node, stranger = callers("node", "else")
    node.add_handler(LEARNT, LearntNames(node, timeout_s=10.0).serve)
    with pytest.raises(CallRefused, match="no part in an average of that group"):
        await stranger.call(Address("node", 1), LEARNT, {"group": GROUP}, timeout_s=600.0)
    assert 10.0 <= trio.current_time() < 11.0
    with pytest.raises(CallRefused, match="group"):
        await stranger.call(Address("node", 1), LEARNT, {"group": bytes(15)}, timeout_s=600.0)


async def test_of_too_many_names_the_newest_travel(autojump_clock: MockClock) -> None:
    """Five experts with 60,000 names each tell 52,428, a fifth of the 262,144 that may; more are refused."""
    names = [number.to_bytes(16, "big") for number in range(60_000)]

    async def tell_all(request: Request) -> Reply:
        return Reply(tensors=(np.full(5, 60_000, INT), packed(names * 5)))

    asking, told, liar = callers("asking", "told", "liar")
    others = LearntNames(told, timeout_s=1.0)
    told.add_handler(LEARNT, others.serve)
    liar.add_handler(LEARNT, tell_all)
    others.offer(GROUP, [names] * 5)
    assert await asked(asking, told, liar, num_experts=5) == ([names[-52_428:]] * 5, {liar.peer_id})
