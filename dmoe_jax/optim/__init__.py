"""Averaging among peers for optimisers: pure JAX and pure Optax.

- `moshpit_average` and `diloco` make of any Optax optimiser one whose parameters, gradients or pseudo-gradients are
  averaged with other peers'; `dmoe_jax.averaging` carries them over the network.
- `moshpit_round` and its like average over a leading axis of simulated peers, on one device or split over a mesh;
  `averaging_methods` are what Moshpit is compared with.

Nothing here opens a connection, waits or starts a task. Of `net` it uses the rule by which groups follow from a grid.
"""

from dmoe_jax.optim.averaging_methods import (
    all_reduce_round,
    gossip_round,
    mixing_factor,
    push_sum_round,
    random_groups_round,
)
from dmoe_jax.optim.moshpit import (
    apply_average,
    averaged_kind,
    averaging_due,
    diloco,
    moshpit_average,
    what_to_send,
    with_average,
)
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
    "averaged_kind",
    "averaging_due",
    "diloco",
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
