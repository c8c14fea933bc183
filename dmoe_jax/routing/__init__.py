"""Routers: which experts a sample goes to, and how their outputs are weighed. See `dmoe_jax.routing.base`.

make_router("switch", (16, 16))                                         by name
make_router("my_router.py:router", (16, 16))                            from a file
chain_routers(product_key((16, 16)), partial(add_noise, stddev=1.0))    put together
router_from_linen(lambda: nn.Dense(32), (16, 16))                       from any Flax module

Factories and combinators give the same object for equal arguments, so that compiled code is shared.
"""

from dmoe_jax.routing.balancing import balanced, balanced_product_key, steer_biases
from dmoe_jax.routing.base import (
    Router,
    RouterError,
    Scores,
    Traffic,
    combine_weights,
    gather_logits,
    masked_softmax,
    router_loss,
    score,
    top_k_router,
)
from dmoe_jax.routing.check import check_router
from dmoe_jax.routing.combinators import (
    add_noise,
    chain_routers,
    drop_experts,
    freeze,
    temperature,
    with_balancing_loss,
    with_z_loss,
)
from dmoe_jax.routing.deepseek_v3 import deepseek_v3
from dmoe_jax.routing.expert_choice import expert_choice
from dmoe_jax.routing.flax_modules import router_from_linen, router_from_nnx
from dmoe_jax.routing.frozen_random import frozen_random
from dmoe_jax.routing.hash_router import hash_router
from dmoe_jax.routing.noisy_top_k import noisy_top_k
from dmoe_jax.routing.peer import peer
from dmoe_jax.routing.product_key import flat_top_k, product_key
from dmoe_jax.routing.registry import ROUTERS, make_router
from dmoe_jax.routing.switch import switch
from dmoe_jax.routing.uniform_random import uniform_random
from dmoe_jax.routing.weights import normalised_weights, probability_weights, uniform_weights

__all__ = [
    "ROUTERS",
    "Router",
    "RouterError",
    "Scores",
    "Traffic",
    "add_noise",
    "balanced",
    "balanced_product_key",
    "chain_routers",
    "check_router",
    "combine_weights",
    "deepseek_v3",
    "drop_experts",
    "expert_choice",
    "flat_top_k",
    "freeze",
    "frozen_random",
    "gather_logits",
    "hash_router",
    "make_router",
    "masked_softmax",
    "noisy_top_k",
    "normalised_weights",
    "peer",
    "probability_weights",
    "product_key",
    "router_from_linen",
    "router_from_nnx",
    "router_loss",
    "score",
    "steer_biases",
    "switch",
    "temperature",
    "top_k_router",
    "uniform_random",
    "uniform_weights",
    "with_balancing_loss",
    "with_z_loss",
]
