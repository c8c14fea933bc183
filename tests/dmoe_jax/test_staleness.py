"""Stale gradients: what optimisers make of them, and how nodes, trainers and trunks count."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax import optim
from dmoe_jax.autodiff import Recording
from dmoe_jax.cli.node_options import ExpertRecipe
from dmoe_jax.cli.train_options import TrunkRecipe
from dmoe_jax.layer_config import Recipe
from dmoe_jax.machine.device import CostModel, InlineDevice
from dmoe_jax.mixture.expert_calls import BACKWARD, FORWARD, Answer, outcomes_of_untrusted, parts_of_untrusted
from dmoe_jax.model import Model, Outcome
from dmoe_jax.models import mlp
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.optim import compensate_delay, moshpit_average, scale_by_staleness
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.trainer import StepRecord, Trainer
from dmoe_jax.trunk import SharedTrunk
from dmoe_net.errors import CallRefused, ConnectionLost
from dmoe_net.identity import PeerId
from dmoe_net.rpc.base import Reply, Request
from tests.dmoe_jax.node_rig import EXPERT, Rig, open_rig, rows
from tests.dmoe_jax.small_swarm import direct_callers, open_small_swarm
from tests.net.direct_network import DirectCaller, DirectNetwork

STALE_SGD = optax.chain(optax.sgd(0.1), scale_by_staleness())
UID = "ffn.0.1"


@pytest.mark.parametrize(("power", "scale"), [(0.5, 0.5), (0.0, 1.0), (1.0, 0.25), (1.5, 0.125)])
def test_updates_are_divided_by_a_power_of_the_staleness(power: float, scale: float) -> None:
    """At staleness 3 by 4 ** power, after any optimiser and in each leaf's own type; at 0, or untold, by 1."""
    params = {"a": jnp.ones(3), "b": jnp.ones(2, jnp.bfloat16)}
    adam = optax.adam(0.5)
    optimizer = optax.with_extra_args_support(optax.chain(adam, scale_by_staleness(power)))
    plain, _ = jax.jit(adam.update)(params, adam.init(params), params)
    stale, *fresh = (
        jax.jit(optimizer.update)(params, optimizer.init(params), params, **told)[0]
        for told in ({"staleness": jnp.int32(3)}, {"staleness": np.float32(0)}, {})
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, np.asarray(b) * scale, rtol=1e-6), stale, plain)
    for each in fresh:
        jax.tree.map(np.testing.assert_array_equal, each, plain)
    assert [leaf.dtype for leaf in jax.tree.leaves(stale)] == [jnp.float32, jnp.bfloat16]
    assert jax.tree.leaves(optimizer.init(params)[1]) == []


@pytest.mark.parametrize("amsgrad", [False, True])
def test_stale_gradients_get_no_momentum(amsgrad: bool) -> None:
    """Fresh ones are Adam's to the bit; from staleness 1 on only the second moment counts; between, a mixture."""
    params = {"a": jnp.ones(3), "b": jnp.ones(2, jnp.bfloat16)}
    plain = (optax.scale_by_amsgrad if amsgrad else optax.scale_by_adam)()
    ours = optim.scale_by_stale_adam(amsgrad=amsgrad)
    state, own_state = plain.init(params), ours.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(own_state)
    for step in range(3):
        grads = jax.tree.map(lambda leaf, step=step: leaf * (3.0 - 2 * step), params)
        adam, state = jax.jit(plain.update)(grads, state, params)
        told = [{"staleness": np.float32(s)} for s in (1, 7, 0.25)]
        one, many, some = (jax.jit(ours.update)(grads, own_state, params, **each)[0] for each in told)
        fresh, own_state = jax.jit(ours.update)(grads, own_state, params)
        jax.tree.map(np.testing.assert_array_equal, (fresh, one, own_state), (adam, many, state))
        np.testing.assert_allclose(some["a"], 0.75 * adam["a"] + 0.25 * one["a"], rtol=1e-6)
        # Of the squares 9, 1, 1 the corrected mean, of which amsgrad keeps the largest so far.
        second = [9.0, 4.998, 3.664][step] if not amsgrad else 9.0
        np.testing.assert_allclose(one["a"], grads["a"] / np.sqrt(second), rtol=1e-3)
    assert jax.tree.leaves(one)[1].dtype == jnp.bfloat16


@pytest.mark.parametrize("value", [-0.5, float("inf"), float("nan")])
def test_powers_and_strengths_that_cannot_be_meant_are_refused(value: float) -> None:
    """The message has what was got."""
    with pytest.raises(ValueError, match=f"power of the staleness must be finite and at least 0, got {value}"):
        scale_by_staleness(value)
    with pytest.raises(ValueError, match=f"strength of a delay compensation .* at least 0, got {value}"):
        compensate_delay(value)


@pytest.mark.parametrize(
    ("what", "own", "factor", "after"),
    [
        ("parameters", -0.5, 7.0, -3.5),  # 7 * -0.5
        ("gradients", 0.0, 8.0, -4.0),  # a step of half the average
        ("pseudo_gradients", -0.5, -7.0, 3.5),  # the anchor 0 minus -7 * 0.5
    ],
)
def test_averages_are_not_scaled(what: Any, own: float, factor: float, after: float) -> None:
    """Inside a `moshpit_average` the optimiser's own update is halved, and what others bring counts in full."""
    outer = optax.sgd(1.0) if what == "pseudo_gradients" else None
    optimizer = moshpit_average(optax.chain(optax.sgd(1.0), scale_by_staleness()), what=what, outer=outer)
    params = jnp.zeros(1)
    updates, state = optimizer.update(jnp.ones(1), optimizer.init(params), params, staleness=3)
    params = optax.apply_updates(params, updates)
    assert params.tolist() == [own]
    sent = optim.what_to_send(state, params)
    params, _ = optim.apply_average(optimizer, optim.with_average(state, sent, factor * sent.tree), params, staleness=3)
    assert params.tolist() == [after]


def test_delay_compensation_is_that_of_the_paper() -> None:
    """2 + 0.5 * 2^2 * (5 - 2) = 8; without the parameters that were read it says what it wants."""
    optimizer = optax.chain(compensate_delay(0.5), optax.sgd(1.0))
    grads, now, read = (jnp.full(2, value) for value in (2.0, 5.0, 2.0))
    updates, _ = optimizer.update(grads, optimizer.init(now), now, read_params=read)
    assert updates.tolist() == [-8.0, -8.0]
    with pytest.raises(ValueError, match=r"read_params=\.\.\."):
        optimizer.update(grads, optimizer.init(now), now)
    with pytest.raises(ValueError, match=r"cannot train an expert on a node.*read_params"):
        ExpertBackend(EXPERT, optimizer, EXPERT.init(jax.random.key(0)))


def test_a_command_scales_as_the_recipe_does() -> None:
    """One default, although the command line does not load what trains."""
    assert ExpertRecipe().staleness_power == TrunkRecipe().staleness_power == Recipe().staleness_power == 0.5


def trained(count: int, seen: list[int] | None = None) -> tuple[tuple[int, float], Any]:
    """One more update of a backend that has taken so many: its updates here and their staleness, and its movement."""
    params = EXPERT.init(jax.random.key(0))
    backend = ExpertBackend(EXPERT, STALE_SGD, params)
    backend.load(backend.state, update_count=count)
    backend.backward([rows(2)], rows(2, seed=1), None, None if seen is None else np.array(seen))
    moved = jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), backend.params, params)
    return (backend.steps_here, backend.staleness_total), moved


def test_an_expert_moves_by_half_of_it_at_staleness_three(compilations: Any) -> None:
    """Rows that saw 2 and 6 of 7 updates have 3 in the mean; counts beyond 7 are not stale; no value compiles anew."""
    fresh, whole = trained(7)
    compiled = compilations.count
    (stale, half), (ahead, as_whole) = trained(7, [2, 6]), trained(7, [9, 2**63 - 1])
    assert compilations.count == compiled
    assert (fresh, stale, ahead) == ((1, 0.0), (1, 3.0), (1, 0.0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b / 2, rtol=1e-3, atol=1e-8), half, whole)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(whole)) > 0.01
    jax.tree.map(np.testing.assert_array_equal, as_whole, whole)


def backends(count: int = 0) -> dict[str, ExpertBackend]:
    found = {uid: ExpertBackend(EXPERT, STALE_SGD, EXPERT.init(jax.random.key(0))) for uid in (UID, "ffn.2.3")}
    found[UID].load(found[UID].state, update_count=count)
    return found


async def learn(rig: Rig, request_id: bytes, x: Any, grads: Any, **said: Any) -> Reply:
    return await rig.call("expert.backward", {"uid": UID, "id": request_id, **said}, x, grads)


async def test_a_joined_batch_has_the_mean_staleness_of_its_rows(autojump_clock: trio.testing.MockClock) -> None:
    """One row of staleness 8 and three of a request that says nothing: the one update is divided by the root of 3."""
    async with open_rig(cost=CostModel(call_s=1.0), backends=backends(count=8)) as rig:
        params = jax.tree.map(jnp.copy, rig.backends[UID].params)
        x, grads = rows(4), rows(4, seed=9)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.forward, "ffn.2.3", rows(1))  # keeps the device busy while the two arrive
            await trio.sleep(0.1)
            nursery.start_soon(functools.partial(learn, rig, b"a", x[:1], grads[:1], seen=0))
            nursery.start_soon(learn, rig, b"b", x[1:], grads[1:])
        assert rig.backends[UID].update_count == 9
        status = rig.node.status()
        assert (status["steps"], status["staleness"]) == (1, 2.0)

        @jax.jit
        def stepped(params: Any) -> Any:
            _, pull = jax.vjp(EXPERT.apply, params, jnp.asarray(x))
            return jax.tree.map(lambda p, g: p - 0.1 * g / np.sqrt(3), params, pull(jnp.asarray(grads))[0])

        expected = stepped(params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), rig.backends[UID].params, expected)


async def test_staleness_is_that_of_the_moment_of_computing(autojump_clock: trio.testing.MockClock) -> None:
    """A request that was fresh when it came waits while another one is computed, and is then one update late."""
    async with open_rig(cost=CostModel(call_s=1.0), backends=backends()) as rig:
        assert rig.node.status()["staleness"] is None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(functools.partial(learn, rig, b"a", rows(1), rows(1), seen=0))
            await trio.sleep(0.1)
            nursery.start_soon(functools.partial(learn, rig, b"b", rows(1), rows(1), seen=0))
        status = rig.node.status()
        assert (status["steps"], status["staleness"]) == (2, 0.5)


async def test_what_a_request_says_of_its_forward_is_checked(autojump_clock: trio.testing.MockClock) -> None:
    """Counts beyond the node's own, as after a restart, are not stale; what is no count is refused."""
    refusal = r"expert ffn\.0\.1: seen must be an integer from 0 to .*, or null, got"
    async with open_rig(backends=backends(count=5)) as rig:
        for seen in (-1, 2**63, 1.0, True, "3", b"3", [3], {}):
            with pytest.raises(CallRefused, match=refusal):
                await learn(rig, b"bad", rows(1), rows(1), seen=seen)
        assert rig.backends[UID].update_count == 5
        for number, said in enumerate([{}, {"seen": None}, {"seen": 99}, {"seen": 2**63 - 1}]):
            await learn(rig, bytes([number]), rows(1), rows(1), **said)
        assert (rig.backends[UID].update_count, rig.node.status()["staleness"]) == (9, 0.0)
        await learn(rig, b"stale", rows(1), rows(1), seen=4)
        assert rig.node.status()["staleness"] == 1.0


CONFIG = mlp.MLPConfig(input_dim=6, num_classes=3, d_model=8, num_layers=1, grid_size=(2, 2), k_best=2, expansion=2)
ROUTER = product_key(CONFIG.grid_size, init_scale=1.0)


def mlp_batches(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    while True:
        yield mlp.Batch(rng.normal(size=(2, 6)).astype(np.float32), rng.integers(0, 3, 2).astype(np.int32))


class Spy(DirectCaller):
    """A caller that notes what is said of experts, part by part, and loses the answer to the first backward call."""

    def __init__(self, network: DirectNetwork, peer_id: PeerId) -> None:
        super().__init__(network, None, peer_id)
        self.said: dict[str, list[tuple[dict[str, Any], bytes, Any]]] = {FORWARD: [], BACKWARD: []}
        """By method, for each part: its description, the samples that it took, and the updates of the answer."""
        self.lost: list[dict[str, Any]] = []

    async def call(self, target: Any, method: str, body: Any, tensors: Any = (), **options: Any) -> Reply:
        options["on_partial"] = None  # all comes in the reply
        reply = await super().call(target, method, body, tensors, **options)
        if method in self.said:
            is_first = not self.said[method]
            request = Request(method=method, body=body, tensors=tensors, peer_id=self.peer_id, peer_address=None)
            parts = parts_of_untrusted(request)
            counts = {number: part["rows"] for number, (part, *_) in enumerate(parts)}
            for number, outcome in outcomes_of_untrusted(reply, counts):
                assert isinstance(outcome, Answer)
                part, _, rows = parts[number]
                self.said[method].append((dict(part), tensors[1][rows].tobytes(), outcome.updates))
            if method == BACKWARD and is_first:
                self.lost = [dict(part) for part, *_ in parts]
                raise ConnectionLost("the connection broke")
        return reply


async def test_a_backward_pass_says_what_its_forward_pass_saw(autojump_clock: trio.testing.MockClock) -> None:
    """Trainers say which updates they saw, in retries too, and nodes count the same; one alone is never stale."""
    network = DirectNetwork(latency_s=0.1)
    node, last = direct_callers(network, 2)
    spy = Spy(network, last.peer_id)
    opened = open_small_swarm([node, spy], CONFIG.expert(), STALE_SGD, prefixes=["layer0"], grid_size=(2, 2))
    async with opened as swarm:
        model = mlp.MLP.on(swarm.swarm, CONFIG, ROUTER)
        trunk = SharedTrunk(model.init(jax.random.key(1)), STALE_SGD, InlineDevice())
        trainers = [Trainer(index, model, trunk, mlp_batches(index)) for index in range(2)]
        await trainers[0].run(3)  # finds the experts, so that nobody waits for the same answer of the DHT
        assert trunk.step == 3
        assert swarm.statistics.staleness_total == 0
        async with trio.open_nursery() as nursery:
            for trainer in trainers:
                nursery.start_soon(trainer.run, 14)
                await trio.sleep(0.05)  # never at the same moment: no two requests are one update
        saw = {(body["uid"], inputs): updates for body, inputs, updates in spy.said[FORWARD]}
        backward = spy.said[BACKWARD]
        assert [body["seen"] for body, _, _ in backward] == [saw[body["uid"], inputs] for body, inputs, _ in backward]
        lost, later = spy.lost, backward[len(spy.lost) :]
        assert lost
        assert [body for body, _, _ in later if body["id"] in {part["id"] for part in lost}] == lost
        updates = [(body["uid"], after) for body, _, after in later]
        assert len(set(updates)) == len(updates)
        assert swarm.statistics.staleness_total > 0
        assert sum(backend.staleness_total for backend in swarm.backends.values()) == swarm.statistics.staleness_total


class Slow(Model):
    """One number that is to become 0, after as many seconds as the batch says; its gradient is the number."""

    def init(self, key: Any) -> Any:
        return jnp.full((), 16.0)

    async def forward(self, run: Recording, params: Any, batch: Any, state: Any, keys: Any) -> Outcome:
        await trio.sleep(batch)
        return Outcome(loss=run(optax.l2_loss, params), items=1)


async def two_trainers(optimizer: optax.GradientTransformation) -> float:
    """The second trainer makes three updates while the first one makes its only one; what becomes of the number."""
    trunk = SharedTrunk(Slow().init(None), optimizer, InlineDevice())
    records: list[StepRecord] = []
    async with trio.open_nursery() as nursery:
        for index, seconds in enumerate(([10.0], [1.0, 1.0, 1.0])):
            nursery.start_soon(Trainer(index, Slow(), trunk, iter(seconds)).run, 4, records.append)
    assert [(record.trainer, record.staleness) for record in records] == [(1, 0), (1, 0), (1, 0), (0, 3)]
    return float(trunk.params)


async def test_a_stale_step_of_the_trunk_is_smaller(autojump_clock: trio.testing.MockClock) -> None:
    """16 is halved three times to 2; then comes 16's own step of 8, of which the staleness 3 leaves half: 2 - 4. With a
    delay compensation of 1/32, of the gradient 16 that was read at 16 remains, at 2, 16 + 256 / 32 * (2 - 16)."""
    assert await two_trainers(optax.sgd(0.5)) == 2 - 8
    assert await two_trainers(optax.chain(optax.sgd(0.5), scale_by_staleness())) == 2 - 4
    assert await two_trainers(optax.chain(compensate_delay(1 / 32), optax.sgd(0.5))) == 2 - (16 - 112) / 2
