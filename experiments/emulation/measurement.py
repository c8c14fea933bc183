"""The same order of events in both, and the seconds that each takes."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.data import DataError
from dmoe_jax.emulator import draw_order, exponential_delays
from dmoe_jax.mixture.local import init_experts, init_opt_states, update_experts
from dmoe_jax.models.layers import LayerAux
from experiments.bench import Experiment, Run
from experiments.emulation.problems import Problem, keys_of, mnist, transformer_xl
from experiments.emulation.settings import EmulationSettings
from experiments.emulation.swarm import train_swarm
from experiments.results import Bar, Result

BARS = (
    Bar(name="emulator_max_difference", bound=1e-5),
    Bar(name="emulator_speedup", bound=15.0, comparison=">="),
    Bar(name="emulator_over_one_jit", bound=0.7, comparison=">="),
)

_COMPARED_TRAINERS = 3
_FAILURE_RATE = 0.1


def measure(run: Run[EmulationSettings]) -> None:
    """Log a record `difference` for each model, and records `speed` for each round."""
    settings = run.settings
    small = mnist(d_model=16, grid_size=(3, 3), num_layers=2, num_evaluated=1)
    _compare(run, small)
    if not settings.quick:
        _compare(run, transformer_xl(d_model=16, d_ff=24, seq_len=16, num_updates=settings.updates, dropout=0.1))
    rounds = 1 if settings.quick else settings.rounds
    _time_mnist(run, rounds)
    if not settings.quick:
        _time_transformer(run, rounds)


def _compare(run: Run[EmulationSettings], problem: Problem) -> None:
    """One order, recorded in the swarm while calls fail, and what both make of it."""
    settings = run.settings
    run.say(f"{problem.name}: {settings.updates} updates of the swarm, recorded")
    emulator = problem.emulator(_COMPARED_TRAINERS, rows=True)
    data = problem.data(_COMPARED_TRAINERS, steps=settings.updates, seed=settings.seed)
    swarm = train_swarm(
        problem,
        emulator,
        data,
        num_updates=settings.updates,
        failure_rate=_FAILURE_RATE,
        seed=settings.seed,
        record=True,
    )
    assert swarm.order is not None
    state = emulator.init(*keys_of(settings.seed), data, num_updates=settings.updates)
    state = emulator.run(state, swarm.order, data)
    pairs = {
        "losses": (state.totals.losses, swarm.losses),
        "trunk": (state.params, swarm.params),
        "experts": (state.expert_params, swarm.experts),
    }
    differences = {name: _difference(*pair) for name, pair in pairs.items()}
    run.log("difference", problem=problem.name, expert_staleness=float(state.expert_staleness), **differences)
    run.say(f"{problem.name}: greatest difference {max(differences.values()):.1e}")


def _difference(ours: Any, theirs: Any) -> float:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()) for a, b in pairs)


def _time_mnist(run: Run[EmulationSettings], rounds: int) -> None:
    """Updates a second of the emulator and of the simulated swarm, in turns: one seed each."""
    settings, problem = run.settings, mnist(num_evaluated=1)
    emulate = _emulation(problem, settings.trainers, 4 * settings.timed_updates, settings.seed)
    emulator = problem.emulator(settings.trainers)
    steps = 2 * settings.timed_updates // settings.trainers + 32
    data = problem.data(settings.trainers, steps=steps, seed=settings.seed)
    for number in range(1, rounds + 1):
        swarm = train_swarm(problem, emulator, data, num_updates=settings.timed_updates, seed=settings.seed + number)
        rates = {"swarm": swarm.timed / swarm.wall_s, "emulator": emulate()}
        run.log("speed", problem=problem.name, round=number, ratio=rates["emulator"] / rates["swarm"], **rates)
        run.say(
            f"{problem.name}, round {number}/{rounds}: {rates['emulator']:.0f} updates/s in the emulator, "
            f"{rates['swarm']:.1f} in the simulated swarm"
        )


def _time_transformer(run: Run[EmulationSettings], rounds: int) -> None:
    """Updates a second of the emulator and of one jit without asynchrony, in turns."""
    settings, updates = run.settings, 4 * run.settings.timed_updates
    problem = transformer_xl(num_updates=updates)
    emulate = _emulation(problem, 32, updates, settings.seed)
    train = _one_jit(problem, settings.seed)
    for number in range(1, rounds + 1):
        rates = {"one_jit": train(), "emulator": emulate()}
        run.log("speed", problem=problem.name, round=number, ratio=rates["emulator"] / rates["one_jit"], **rates)
        run.say(
            f"{problem.name}, round {number}/{rounds}: {rates['emulator']:.1f} updates/s in the emulator, "
            f"{rates['one_jit']:.1f} in one jit"
        )


def _emulation(problem: Problem, num_trainers: int, num_updates: int, seed: int) -> Callable[[], float]:
    """Compile an emulator; measures how many updates a second it makes, after the first quarter of them."""
    emulator = problem.emulator(num_trainers)
    order = draw_order(
        num_updates=num_updates,
        num_trainers=num_trainers,
        num_layers=emulator.num_layers,
        num_pairs=problem.batch_size * emulator.k_best,
        delay=exponential_delays(0.125),
        seed=seed,
    )
    data = jax.tree.map(jnp.asarray, problem.data(num_trainers, steps=order.steps, seed=seed))
    first = int(order.updates[num_updates // 4])

    def rate() -> float:
        state = emulator.init(*keys_of(seed), data, num_updates=num_updates)
        state = emulator.run(state, order, data, stop=first)
        began = time.perf_counter()
        emulator.run(state, order, data, start=first)
        return (num_updates - 1 - num_updates // 4) / (time.perf_counter() - began)

    return rate


def _one_jit(problem: Problem, seed: int, *, steps: int = 128) -> Callable[[], float]:
    """Compile one trainer with everything on this device: a scan over updates, each of one batch.

    The same computing as the emulator's: every chosen expert's forward, its forward again and backward, an update of
    each of them and of the trunk.
    """
    emulator = problem.emulator(1)
    stages, layers = emulator.stages, emulator.stages.layers
    trunk_optimizer, expert_optimizer = map(optax.with_extra_args_support, problem.optimizers)
    trunk_key, expert_key = keys_of(seed)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), problem.data(1, steps=steps, seed=seed))
    first = jax.tree.map(lambda leaf: np.asarray(leaf[0]), data.batches)
    grid_size = layers[0].router.grid_size

    def loss(params: Any, experts: Any, batch: Any, state: Any) -> tuple[Any, tuple[Any, list[LayerAux]]]:
        outcome, routed = stages.routed(params, experts, batch, state)
        return outcome.loss, (outcome.state, routed)

    @jax.jit
    def run(carry: Any) -> Any:
        def one(carry: Any, batch: Any) -> tuple[Any, Any]:
            params, opt_state, experts, expert_states, state = carry
            (value, (state, routed)), (grads, expert_grads) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
                params, experts, batch, state
            )
            updates, opt_state = trunk_optimizer.update(grads, opt_state, params)
            new = [
                update_experts(expert_optimizer, own, own_state, own_grads, aux.load > 0)
                for own, own_state, own_grads, aux in zip(experts, expert_states, expert_grads, routed, strict=True)
            ]
            experts, expert_states = [each[0] for each in new], [each[1] for each in new]
            return (optax.apply_updates(params, updates), opt_state, experts, expert_states, state), value

        return jax.lax.scan(one, carry, data.batches)[0]

    params = stages.model.init(trunk_key)
    experts = [init_experts(expert_key, layer.expert, layer.prefix, grid_size) for layer in layers]
    states = [init_opt_states(expert_optimizer, own) for own in experts]
    carry = (params, trunk_optimizer.init(params), experts, states, stages.model.initial_state(first))
    jax.block_until_ready(run(carry))

    def rate() -> float:
        began = time.perf_counter()
        jax.block_until_ready(run(carry))
        return steps / (time.perf_counter() - began)

    return rate


def summarise(run: Run[EmulationSettings]) -> Result | None:
    """Take the greatest difference, and medians over the rounds; None where nothing was compared."""
    differences = run.records("difference")
    if not differences:
        return None
    figures: dict[str, Any] = {}
    for each in differences:
        greatest = max(each["losses"], each["trunk"], each["experts"])
        figures[f"max_difference_{_key(each['problem'])}"] = greatest
    figures["emulator_max_difference"] = max(figures.values())
    rates = run.records("speed")
    for problem, name in (("MNIST", "emulator_speedup"), ("Transformer-XL", "emulator_over_one_jit")):
        own = [each for each in rates if each["problem"] == problem]
        if own:
            figures[name] = median(each["ratio"] for each in own)
            figures[f"updates_per_s_{_key(problem)}"] = median(each["emulator"] for each in own)
    return Result(
        title="The emulator beside the swarm",
        summary=f"{run.settings.updates} updates on the swarm's own order of events, with failing calls; then updates "
        "a second of one seed, in turns.",
        figures=figures,
        bars=BARS[:2] if run.settings.quick else BARS,
    )


def _key(problem: str) -> str:
    return problem.lower().replace("-", "_")


EXPERIMENT = Experiment(measure=measure, summarise=summarise, expected=(DataError,))
