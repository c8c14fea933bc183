"""Every router routes rows of feed-forward experts alike on one machine and over a network."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.autodiff import Recording, Value, value_and_grad
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.mixture.local import local_mixture
from dmoe_jax.mixture.local_update import init_opt_states, update_experts
from dmoe_jax.routing.base import Router, gather_logits, score
from dmoe_jax.routing.combinators import add_noise, chain_routers, drop_experts, with_balancing_loss
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.routing.registry import ROUTERS
from tests.dmoe_jax.small_swarm import close, direct_callers, open_small_swarm
from tests.net.direct_network import DirectNetwork

GRID = (2, 3)
K_BEST = 2
D_MODEL = 8
BATCH, SEQ = 2, 3
EXPERT = feedforward(d_model=D_MODEL, expansion=1)
OPTIMIZER = optax.adam(1e-2)
UPDATE_EXPERTS = jax.jit(partial(update_experts, OPTIMIZER))
IDS = jnp.arange(BATCH * SEQ, dtype=jnp.int32) * 7

CASES: dict[str, Any] = {
    **ROUTERS,
    "a stack": lambda grid: chain_routers(
        product_key(grid), partial(add_noise, stddev=1.0), partial(drop_experts, rate=0.3), with_balancing_loss
    ),
}


def rows_of(hidden: Any) -> Any:
    """Every token is a sample of its own."""
    return hidden.reshape(-1, D_MODEL)


def project(params: Any, mixed: Any, penalty: Any) -> Any:
    return jnp.mean((mixed.reshape(BATCH, SEQ, D_MODEL) @ params["out"]) ** 2) + penalty


def gate_of(router: Router) -> Any:
    def gate(params: Any, rows: Any, key_data: Any) -> Any:
        return score(router, params["gate"], rows, key=jax.random.wrap_key_data(key_data), ids=IDS)

    return gate


@pytest.mark.parametrize(
    "router_name", [*sorted(ROUTERS), *(pytest.param(name, marks=pytest.mark.slow) for name in CASES.keys() - ROUTERS)]
)
async def test_alike_per_token(router_name: str, autojump_clock: trio.testing.MockClock) -> None:
    """Loss with its penalty, gradients of gate, input and head, and expert updates agree to 1e-5 over two steps."""
    router = CASES[router_name](GRID)
    gate = gate_of(router)
    params = {
        "gate": router.init(jax.random.key(1), D_MODEL),
        "hidden": jax.random.normal(jax.random.key(2), (BATCH, SEQ, D_MODEL)),
        "out": jax.random.normal(jax.random.key(3), (D_MODEL, 3)),
    }

    def local_loss(params: Any, experts: Any, key_data: Any) -> tuple[Any, Any]:
        rows = rows_of(params["hidden"])
        scores = gate(params, rows, key_data)
        indices, mask = router.select(scores, K_BEST)
        weights = router.combine(gather_logits(scores, indices, GRID), mask)
        mixed = local_mixture(EXPERT, experts, GRID, indices, mask, weights, rows)
        used = jnp.zeros(GRID, bool).at[indices[..., 0], indices[..., 1]].max(mask).reshape(-1)
        return project(params, mixed, router.aux_loss(scores, indices, mask)), used

    local_step = jax.jit(jax.value_and_grad(local_loss, argnums=(0, 1), has_aux=True))
    callers = direct_callers(DirectNetwork(), 3)
    async with open_small_swarm(callers, EXPERT, OPTIMIZER, prefixes=["ffn"], grid_size=GRID) as swarm:
        mixture = swarm.mixture(EXPERT, router, "ffn", k_best=K_BEST)

        async def forward(run: Recording, params: Any, key_data: Any) -> Value:
            rows = run(rows_of, params["hidden"])
            scores = run(gate, {"gate": params["gate"]}, rows, key_data)
            return run(project, params, *await mixture(run, scores, rows))

        experts = swarm.stacked_params("ffn", GRID)
        states = init_opt_states(OPTIMIZER, experts)
        for step in range(2):
            key_data = np.array([5, step + 1], np.uint32)
            (expected_loss, used), (expected, expert_grads) = local_step(params, experts, key_data)
            loss, grads = await value_and_grad(forward)(params, key_data)
            np.testing.assert_allclose(loss, expected_loss, atol=1e-5)
            close(grads, expected)
            experts, states = UPDATE_EXPERTS(experts, states, expert_grads, used)
            close(swarm.stacked_params("ffn", GRID), experts)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        assert swarm.statistics.failed == swarm.statistics.late == 0
