"""The emulator: equal to the swarm on the swarm's order of events, and to one jit where nothing is asynchronous."""

import dataclasses
import functools
import gc
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.autodiff import without_waiting
from dmoe_jax.data.batches import SegmentStream, evaluation_segments
from dmoe_jax.emulator import Data, Emulator, draw_order, exponential_delays, stack_seeds, take_batches
from dmoe_jax.emulator.emulator import keeps_what_is_infinite
from dmoe_jax.emulator.order import BACKWARD, FORWARD, STAGE, EventOrder
from dmoe_jax.emulator.state import SwarmState
from dmoe_jax.layer_config import LayerConfig, Route
from dmoe_jax.mixture.local_update import init_opt_states, update_experts
from dmoe_jax.models import mlp
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.optim.staleness import compensate_delay, scale_by_staleness
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.trained.evaluation import evaluate_text
from dmoe_jax.trained.readers import LocalReader
from experiments.emulation.problems import Problem, keys_of, mnist
from experiments.emulation.recording import OrderRecorder
from experiments.emulation.swarm import SwarmRun, train_swarm
from tests.dmoe_jax.small_swarm import close

CONFIG = mlp.MLPConfig(input_dim=6, num_classes=3, d_model=8, num_layers=2, grid_size=(2, 3), k_best=2, expansion=2)
ROUTER = product_key(CONFIG.grid_size, init_scale=1.0)
# A gate whose samples have one answer each has no gradient, up to rounding: a small eps would make whole steps of that.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.amsgrad(1e-2, eps=1e-3), scale_by_staleness())
BATCH = 4


def stream(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    while True:
        x = rng.normal(size=(BATCH, 6)).astype(np.float32)
        yield mlp.Batch(x, x.reshape(BATCH, 3, 2).max(axis=-1).argmax(axis=-1).astype(np.int32))


PROBLEM = Problem(
    name="MLP",
    make_model=lambda swarm, **options: mlp.MLP.on(swarm, CONFIG, ROUTER, **options),
    batch_size=BATCH,
    streams=lambda num_trainers, seed: [stream(100 * seed + trainer) for trainer in range(num_trainers)],
    evaluation=tuple(itertools.islice(stream(7), 3)),
    optimizer=optax.chain(compensate_delay(0.5), OPTIMIZER),
    expert_optimizer=OPTIMIZER,
)


def small_transformer(route: Route) -> Problem:
    """With dropout, memory, texts that end, and an adaptive softmax."""
    layer = LayerConfig(d_model=8, num_heads=2, d_ff=12, seq_len=6, mem_len=6, dropout=0.2)
    sizes: dict[str, Any] = {"vocab_size": 40, "num_layers": 2, "grid_size": (2, 2), "k_best": 2, "cutoffs": (20,)}
    config = TransformerXLConfig(**sizes, route=route, layer=layer, input_dropout=0.2)
    text, router = np.random.default_rng(0).integers(0, 40, 200), product_key((2, 2), init_scale=1.0)
    return Problem(
        name="Transformer-XL",
        make_model=lambda swarm, **options: txl.TransformerXL.on(swarm, config, router, **options),
        batch_size=config.samples(2),
        streams=lambda num_trainers, seed: [
            SegmentStream(text, batch_size=2, seq_len=6, shard=trainer, num_shards=num_trainers, seed=seed)
            for trainer in range(num_trainers)
        ],
        evaluation=tuple(evaluation_segments(text, batch_size=2, seq_len=6)),
        optimizer=OPTIMIZER,
        expert_optimizer=OPTIMIZER,
    )


NUM_TRAINERS, NUM_UPDATES = 3, 50


@functools.cache
def three_trainers() -> Emulator:
    """For tests that compile the same program."""
    return PROBLEM.emulator(NUM_TRAINERS)


def drawn(updates: int, *, num_trainers: int = NUM_TRAINERS, num_layers: int = 2, **options: Any) -> EventOrder:
    options = {"num_pairs": BATCH * CONFIG.k_best, "delay": exponential_delays(0.1), **options}
    return draw_order(num_updates=updates, num_trainers=num_trainers, num_layers=num_layers, **options)


def in_both(problem: Problem, emulator: Emulator, *, seed: int = 0) -> tuple[SwarmState, SwarmRun]:
    """(what the emulator makes of an order of events, the swarm that took it): one call in ten fails."""
    data = problem.data(NUM_TRAINERS, steps=NUM_UPDATES, seed=seed)
    swarm = train_swarm(problem, emulator, num_updates=NUM_UPDATES, failure_rate=0.1, seed=seed, record=True)
    assert swarm.order is not None
    state = emulator.init(*keys_of(seed), data, num_updates=NUM_UPDATES)
    return emulator.run(state, swarm.order, data), swarm


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "transformer", "transformer by token", "mnist"])
def test_equals_the_swarm(model: str) -> None:
    """On the order that a simulated swarm took, losses, trunk and experts are the swarm's after fifty updates."""
    # Calls of the MLP compute whole batches, others the rows that they serve. With MNIST and the papers' optimiser both
    # must be compiled with the same library, and seed 2 makes a ReLU's input zero but for rounding.
    problem, emulator, seed = PROBLEM, three_trainers(), 0
    if model == "mnist":
        problem, seed = mnist(d_model=16, grid_size=(3, 3), num_layers=2, num_evaluated=1), 1
        emulator = problem.emulator(NUM_TRAINERS, rows=True, same_kernels=True)
    elif model != "mlp":
        problem = small_transformer("token" if model.endswith("token") else "sequence")
        emulator = problem.emulator(NUM_TRAINERS, rows=True)
    state, swarm = in_both(problem, emulator, seed=seed)
    assert int(state.step) == NUM_UPDATES
    if model != "mnist":
        assert np.asarray(state.totals.staleness).max() >= 2
        assert float(state.expert_staleness * state.calls) > 50
    np.testing.assert_allclose(state.totals.losses, swarm.losses, rtol=0, atol=1e-5)
    atol = 3e-5 if model == "mnist" else 1e-5
    close((state.params, state.expert_params), (swarm.params, swarm.experts), atol)


@pytest.mark.slow
def test_equals_the_swarm_in_float64() -> None:
    """To its rounding, with the papers' optimiser: what float32 would hide behind its own has nowhere to hide."""
    with jax.enable_x64(True):
        config = dataclasses.replace(CONFIG, dtype="float64")
        optimizer = optax.chain(optax.amsgrad(1e-2), scale_by_staleness())
        problem = dataclasses.replace(
            PROBLEM,
            make_model=lambda swarm, **options: mlp.MLP.on(swarm, config, ROUTER, **options),
            streams=lambda num_trainers, seed: [
                (batch._replace(x=batch.x.astype(np.float64)) for batch in own)
                for own in PROBLEM.streams(num_trainers, seed)
            ],
            optimizer=optimizer,
            expert_optimizer=optimizer,
        )
        state, swarm = in_both(problem, problem.emulator(NUM_TRAINERS, rows=True))
        found = state.params, state.expert_params
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype("float64")}
        close(found, (swarm.params, swarm.experts), 1e-10)


@pytest.mark.slow
def test_trust_changes_nothing() -> None:
    """Pieces that look for infinities at their end give what a run gives that looks at every update. A piece that has
    any is run again from its beginning, although copies of the pieces before it lay in the same memory. A run with few
    calls for its experts does without such copies, as long as the emulator has not begun to trust."""
    emulator = PROBLEM.emulator(NUM_TRAINERS)
    data, broken = (PROBLEM.data(NUM_TRAINERS, steps=NUM_UPDATES, seed=0) for _ in range(2))
    broken.batches.x[0, 1] = np.inf

    def run(order: EventOrder, data: Data, *cuts: int) -> tuple[SwarmState, list[int], float]:
        """State after the pieces of an order, updates that each had rejected, and states that memory holds now."""
        gc.collect()
        before = held()
        state, rejected = emulator.init(*keys_of(3), data, num_updates=NUM_UPDATES), []
        for start, stop in itertools.pairwise((0, *cuts, len(order.kind))):
            state = emulator.run(state, order, data, start=start, stop=stop)
            rejected.append(int(state.rejected))
        return state, rejected, (held() - before) / sum(leaf.nbytes for leaf in jax.tree.leaves(state))

    def held() -> int:
        return sum(leaf.nbytes for leaf in jax.live_arrays())

    # At most (9 + 2) * 2 * 8 backward calls, with those of steps that do not end; fewer than sixteen for each expert.
    few = drawn(9, failure_rate=0.1)
    third = len(few.kind) // 3
    careful, _, copies = run(few, broken)
    assert copies < 1.5
    assert run(drawn(20), data)[2] > 1.9
    trusting, rejected, _ = run(few, broken, third // 2, third, 2 * third)
    assert rejected[1] == 0 < rejected[-1]  # two pieces were sound, and copied, before one was not
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((trusting.params, trusting.expert_params)))
    close(trusting, careful)


@pytest.mark.slow
def test_places_for_trainers_and_experts_that_are_used_again() -> None:
    """Trainers that never begin a step change nothing; nor do initial experts that other runs began with."""
    small, roomy = PROBLEM.emulator(2), three_trainers()
    data = PROBLEM.data(NUM_TRAINERS, steps=NUM_UPDATES, seed=0)
    order = drawn(6, num_trainers=2)
    two = jax.tree.map(lambda leaf: leaf[:2], data)
    trunk_key, expert_key = keys_of(3)
    alone = small.run(small.init(trunk_key, expert_key, two, num_updates=6), order, two)
    experts = roomy.init_experts(expert_key)
    for _ in range(2):
        state = roomy.init(trunk_key, experts, data, num_updates=6)
        state = roomy.run(state, dataclasses.replace(order, num_trainers=NUM_TRAINERS), data)
        close((state.params, state.expert_params), (alone.params, alone.expert_params))
        np.testing.assert_array_equal(state.totals.staleness, alone.totals.staleness)


def test_one_trainer_is_one_jit() -> None:
    """A run in which nothing is asynchronous and nobody fails equals a run of the whole model in one jit."""
    emulator, steps = PROBLEM.emulator(1), 4
    data = PROBLEM.data(1, steps=steps, seed=0)
    state = emulator.init(jax.random.key(3), jax.random.key(5), data, num_updates=steps)
    state = emulator.run(state, drawn(steps, num_trainers=1), data)
    trunk = mlp.init_trunk(jax.random.key(3), CONFIG, ROUTER)
    experts = mlp.init_experts(jax.random.key(5), CONFIG)
    trunk_state, states = OPTIMIZER.init(trunk), [init_opt_states(OPTIMIZER, layer) for layer in experts]

    @jax.jit
    def step(trunk: Any, trunk_state: Any, experts: Any, states: Any, batch: Any) -> Any:
        run = jax.value_and_grad(mlp.local_forward, argnums=(0, 1), has_aux=True)
        (loss, aux), (trunk_grads, expert_grads) = run(trunk, experts, CONFIG, ROUTER, batch)
        updates, trunk_state = OPTIMIZER.update(trunk_grads, trunk_state, trunk)
        updated = [
            update_experts(OPTIMIZER, params, own, grads, layer.load > 0)
            for params, own, grads, layer in zip(experts, states, expert_grads, aux.layers, strict=True)
        ]
        experts, states = tuple(new[0] for new in updated), [new[1] for new in updated]
        return optax.apply_updates(trunk, updates), trunk_state, experts, states, loss

    losses = []
    for number in range(steps):
        batch = jax.tree.map(lambda leaf, number=number: jnp.asarray(leaf[0, number]), data.batches)
        trunk, trunk_state, experts, states, loss = step(trunk, trunk_state, experts, states, batch)
        losses.append(float(loss))
    np.testing.assert_allclose(state.totals.losses, losses, atol=1e-5)
    close(state.params, trunk)
    close(state.expert_params, tuple(experts))
    assert float(state.expert_staleness) == 0
    assert np.asarray(state.totals.staleness).tolist() == [0] * steps
    assert sum(int(layer.load.sum()) for layer in state.experts) == steps * 2 * BATCH * CONFIG.k_best


def test_who_forgets_infinities_is_not_trusted() -> None:
    """A schedule's step size is written anew by each update."""
    expert, scheduled = PROBLEM.emulator(1).expert, optax.inject_hyperparams(optax.sgd)
    keeping = OPTIMIZER, optax.flatten(optax.adam(1e-3)), optax.sgd(1e-2, momentum=0.9), None, scheduled(1e-2)
    assert all(keeps_what_is_infinite(expert, optimizer) for optimizer in keeping)
    assert not keeps_what_is_infinite(expert, scheduled(optax.constant_schedule(1e-2)))


@pytest.mark.slow
def test_seeds_side_by_side() -> None:
    """Several seeds of one order give what each gives alone, and evaluations are those of the model in one jit."""
    emulator, updates = PROBLEM.emulator(2), 6
    order = drawn(updates, num_trainers=2, failure_rate=0.2)
    each = [PROBLEM.data(2, steps=updates, seed=seed) for seed in range(2)]
    keys = [keys_of(seed) for seed in range(2)]
    both = stack_seeds(each)
    together = emulator.init(*map(jnp.stack, zip(*keys, strict=True)), both, num_updates=updates)
    together = emulator.run(together, order, both)
    evaluations = emulator.evaluate(together, PROBLEM.evaluation)
    for seed in range(2):
        alone = emulator.run(emulator.init(*keys[seed], each[seed], num_updates=updates), order, each[seed])
        close(jax.tree.map(lambda leaf, seed=seed: leaf[seed], together.params), alone.params)
        close(together.totals.losses[seed], alone.totals.losses)
        batches, models = jax.tree.map(jnp.asarray, PROBLEM.evaluation), (alone.params, alone.expert_params)
        losses = [mlp.local_forward(*models, CONFIG, ROUTER, batch)[1].nll for batch in batches]
        assert evaluations[seed].loss == pytest.approx(float(np.mean(losses)), abs=1e-5)
        assert 0 < evaluations[seed].metrics["accuracy"] < 1
    with pytest.raises(ValueError, match="several seeds need rows=False"):
        PROBLEM.emulator(2, rows=True).init(*map(jnp.stack, zip(*keys, strict=True)), both, num_updates=1)
    with pytest.raises(ValueError, match="there is nothing to evaluate"):
        emulator.evaluate(together, ())
    with pytest.raises(ValueError, match="expected 3 batches for trainer 0, got 2"):
        take_batches(emulator.stages.model, [itertools.islice(stream(0), 2)], steps=3)


def test_orders_are_those_of_the_protocol() -> None:
    """Every step has its stages in order and its calls between them; failures are as many as asked for."""
    order = drawn(200, num_trainers=8, num_pairs=6, failure_rate=0.25, seed=3)
    assert len(order.updates) == 200
    assert order.updates[-1] == len(order.kind) - 1
    for trainer in range(8):
        own = order.trainer == trainer
        kinds = order.kind[own].tolist()
        whole = [[STAGE + number, *[call] * 6] for number, call in enumerate((FORWARD, FORWARD, BACKWARD, BACKWARD))]
        whole = [*itertools.chain(*whole), STAGE + 4]
        assert kinds == (whole * (len(kinds) // len(whole) + 1))[: len(kinds)]
    calls = order.kind < STAGE
    assert abs(1 - order.answered[calls].mean() - 0.25) < 0.02
    with pytest.raises(ValueError, match="failure_rate must be from 0 to below 1, got 1"):
        drawn(1, failure_rate=1.0)


@pytest.mark.parametrize(("concurrency", "at_work"), [(1, 1), (3, 3), (None, 5), (9, 5)])
def test_trainers_take_turns(concurrency: int | None, at_work: int) -> None:
    """No more than that are between their first and their last stage at once, and all get as many turns."""
    order = drawn(60, num_trainers=5, num_layers=1, num_pairs=2, concurrency=concurrency)
    stages = order.kind >= STAGE
    busy, most = set(), 0
    for kind, trainer in zip(order.kind[stages], order.trainer[stages], strict=True):
        busy.add(int(trainer))
        most = max(most, len(busy))
        if kind == STAGE + 2:
            busy.remove(int(trainer))
    assert most == at_work
    turns = order.trainer[order.updates]
    if at_work == 1:
        assert turns.tolist() == [0, 1, 2, 3, 4] * 12
    assert np.bincount(turns).min() >= 7
    with pytest.raises(ValueError, match="concurrency must be a positive integer, got 0"):
        drawn(1, concurrency=0)


def test_what_cannot_be_emulated_is_refused() -> None:
    emulator = PROBLEM.emulator(2)
    data = PROBLEM.data(2, steps=2, seed=0)
    state = emulator.init(jax.random.key(0), jax.random.key(0), data, num_updates=1)
    with pytest.raises(ValueError, match=r"of \(trainers, layers, pairs\) \(2, 2, 8\), got \(3, 2, 8\)"):
        emulator.run(state, drawn(1), data)
    with pytest.raises(ValueError, match=r"expected at least \d+ batches for each trainer, one a step, got 2"):
        emulator.run(state, drawn(9, num_trainers=2), data)

    class NoMixture(mlp.MLP):
        def __init__(self, swarm: Any) -> None:
            self.name = "dense"

    with pytest.raises(ValueError, match="model 'dense' has no mixture"):
        Emulator(NoMixture, optimizer=OPTIMIZER, expert_optimizer=None, num_trainers=1)
    with pytest.raises(ValueError, match="the recorder has seen no update"):
        OrderRecorder(["layer0", "layer1"], CONFIG.grid_size).order(num_trainers=1, num_pairs=1)


@pytest.mark.parametrize("route", ["sequence", "token"])
def test_a_trained_model_is_evaluated_as_here(route: Route) -> None:
    """The evaluation of saved models, and of those in swarms, gives the emulator's loss of the same parameters."""
    problem = small_transformer(route)
    emulator = problem.emulator(NUM_TRAINERS, rows=True)
    state = emulator.init(*keys_of(0), problem.data(NUM_TRAINERS, steps=1, seed=0), num_updates=1)
    (expected,) = emulator.evaluate(state, problem.evaluation)
    model = emulator.stages.model
    reader = LocalReader(model.config, model.router, state.params, state.expert_params)
    text = np.random.default_rng(0).integers(0, 40, 200)
    found = without_waiting(evaluate_text(reader, text, rows=2))
    assert found.loss == pytest.approx(expected.loss, abs=1e-5)
    assert found.tokens == expected.items == 199
