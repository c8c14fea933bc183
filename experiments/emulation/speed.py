"""Updates a second of the emulator, and of the same computing without asynchrony."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.emulator import draw_order, exponential_delays
from dmoe_jax.mixture.local import init_experts
from dmoe_jax.mixture.local_update import chosen_value_and_grad, init_opt_states, update_chosen
from dmoe_jax.models.layers import LayerAux
from experiments.emulation.problems import Problem, keys_of, mnist, transformer_xl


def updates_per_s(*, what: str, trainers: int, updates: int, seed: int) -> float:
    """Train once more, timed. The first call compiles, which is not.

    Args:
      what: "mnist" or "transformer-xl" in the emulator, or "transformer-xl-one-jit": one trainer on this device.
      trainers: of the emulator. updates: of a run of it. seed: of everything.
    """
    return _compiled(what, trainers, updates, seed)()


@functools.cache
def _compiled(what: str, trainers: int, updates: int, seed: int) -> Callable[[], float]:
    problem = mnist(num_evaluated=1) if what == "mnist" else transformer_xl(num_updates=updates)
    return _one_jit(problem, seed) if what.endswith("-one-jit") else _emulation(problem, trainers, updates, seed)


def _emulation(problem: Problem, num_trainers: int, num_updates: int, seed: int) -> Callable[[], float]:
    """Compile an emulator. What is returned measures its updates a second, after the first quarter of them."""
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

    gradient = chosen_value_and_grad(loss, layers_of=lambda aux: aux[1])

    @jax.jit
    def run(carry: Any) -> Any:
        def one(carry: Any, batch: Any) -> tuple[Any, Any]:
            params, opt_state, experts, expert_states, state = carry
            (value, (state, routed)), (grads, expert_grads) = gradient(params, experts, batch, state)
            updates, opt_state = trunk_optimizer.update(grads, opt_state, params)
            new = [
                update_chosen(expert_optimizer, own, own_state, own_grads, aux.load > 0)
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
