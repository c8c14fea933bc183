"""Averaging among peers for optimisers.

In Optax (`moshpit`), over an axis of simulated peers (`peer_axis`, with the methods that it is compared with in
`averaging_methods`), and between trainer processes over the network (`trunk_averaging`, which is imported by its own
name: what stands here does without a network).
"""

from dmoe_jax.optim.averaging_methods import (
    all_reduce_round,
    gossip_round,
    mixing_factor,
    push_sum_round,
    random_groups_round,
)
from dmoe_jax.optim.moshpit import apply_average, averaging_due, moshpit_average, what_to_send, with_average
from dmoe_jax.optim.moshpit_state import MoshpitState, Sent
from dmoe_jax.optim.peer_axis import (
    FailureRule,
    group_mean,
    moshpit_round,
    moshpit_rounds,
    random_cells,
    sharded_moshpit_rounds,
)
from dmoe_jax.optim.peer_trees import distortion

__all__ = [
    "FailureRule",
    "MoshpitState",
    "Sent",
    "all_reduce_round",
    "apply_average",
    "averaging_due",
    "distortion",
    "gossip_round",
    "group_mean",
    "mixing_factor",
    "moshpit_average",
    "moshpit_round",
    "moshpit_rounds",
    "push_sum_round",
    "random_cells",
    "random_groups_round",
    "sharded_moshpit_rounds",
    "what_to_send",
    "with_average",
]
