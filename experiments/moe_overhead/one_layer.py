"""One mixture of feed-forward experts on this device: what a larger grid costs in time, and more rows in memory."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from dmoe_jax.arrays import PyTree
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.mixture.local import init_experts
from dmoe_jax.mixture.local_update import chosen_value_and_grad, init_opt_states, update_chosen
from dmoe_jax.models.layers import LayerAux, dmoe_layer
from dmoe_jax.routing.base import Router, score
from dmoe_jax.routing.product_key import product_key

D_MODEL = 64
"""Width of the layer. An expert has 100 thousand parameters."""
K_BEST = 4
"""Experts for each row."""
GRIDS = {16: (4, 4), 64: (8, 8)}
"""The grids that are compared, by their number of experts."""
GRID_ROWS = 4
"""Rows of a step whose time is taken: 16 calls of experts, so that most experts of the larger grid have none."""
TOKENS = (512, 2048)
"""Rows of the passes whose memory is compared, in the larger grid."""

_OPTIMIZER = optax.adam(1e-3)


def layer_loss(router: Router, gate: PyTree, experts: Any, x: Float[Array, "rows d_model"]) -> tuple[Array, LayerAux]:
    """A loss that every output has a part in, for `experts` the stacked parameters; and what the layer did."""
    mixed, aux = dmoe_layer(feedforward(d_model=D_MODEL), experts, router, K_BEST, score(router, gate, x), None, x)
    return jnp.mean(jnp.square(mixed)) + aux.aux_loss, aux


def grid_training(num_experts: int, seed: int) -> Callable[[], None]:
    """Makes the next training step of a layer with so many experts, each of which has an optimiser of its own."""
    router, key = product_key(GRIDS[num_experts]), jax.random.key(seed)
    batches = itertools.cycle(jax.random.normal(key, (16, GRID_ROWS, D_MODEL)))

    def loss(gate: PyTree, experts: tuple[PyTree, ...], x: Array) -> tuple[Array, tuple[LayerAux, ...]]:
        value, aux = layer_loss(router, gate, experts[0], x)
        return value, (aux,)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state: Any, x: Array) -> Any:
        gate, gate_state, experts, expert_state = state
        gradient = chosen_value_and_grad(loss, layers_of=lambda aux: aux)
        (_, (aux,)), (grads, (expert_grads,)) = gradient(gate, (experts,), x)
        updates, gate_state = _OPTIMIZER.update(grads, gate_state, gate)
        experts, expert_state = update_chosen(_OPTIMIZER, experts, expert_state, expert_grads, aux.load > 0)
        return optax.apply_updates(gate, updates), gate_state, experts, expert_state

    gate, experts = jax.jit(functools.partial(_init, router))(key)
    state = (gate, _OPTIMIZER.init(gate), experts, init_opt_states(_OPTIMIZER, experts))

    def step() -> None:
        nonlocal state
        state = jax.block_until_ready(train(state, next(batches)))

    return step


def peak_bytes(num_tokens: int) -> int:
    """Temporary and returned memory of a forward and backward pass of so many rows, as the compiler plans it."""
    router = product_key(GRIDS[max(GRIDS)])
    gate, experts = jax.eval_shape(functools.partial(_init, router), jax.random.key(0))
    x = jax.ShapeDtypeStruct((num_tokens, D_MODEL), jnp.float32)
    gradient = jax.value_and_grad(functools.partial(layer_loss, router), argnums=(0, 1, 2), has_aux=True)
    analysis = jax.jit(gradient).lower(gate, experts, x).compile().memory_analysis()
    assert analysis is not None  # on CPU and GPU there is one
    return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes)


def _init(router: Router, key: Array) -> tuple[PyTree, PyTree]:
    expert = feedforward(d_model=D_MODEL)
    return router.init(key, D_MODEL), init_experts(key, expert, "ffn", router.grid_size)
