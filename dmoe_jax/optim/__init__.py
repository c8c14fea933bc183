"""Optimisers, averaging and stale gradients of decentralised training: pure JAX and pure Optax.

- `moshpit_average` makes of any Optax optimiser one whose parameters, gradients or pseudo-gradients (DiLoCo) are
  averaged with other peers'; `ErrorFeedback` compresses them. `streaming_diloco` and `noloco` send less, or at other
  times. All leave averaging to the host (`host_state`); `dmoe_jax.averaging` carries it over the network.
- `moshpit_round` and its like average over a leading axis of simulated peers, on one device or split over a mesh.
- `collaborative` makes of an optimiser one for a batch that many peers gather; `LossScale` is for float16 gradients.
- `scale_by_staleness`, `scale_by_stale_adam` and `compensate_delay` are for stale gradients; `make_optimizer(Recipe())`
  is the optimiser of `dmoe node` and `dmoe train`.
"""

from dmoe_jax.layer_config import Recipe
from dmoe_jax.optim.collaborative import Collaborative, LossScale, collaborative
from dmoe_jax.optim.compression import ErrorFeedback, compress, sparse_vector, zero_residual
from dmoe_jax.optim.host_state import (
    HostState,
    Sent,
    apply_average,
    averaging_due,
    host_state,
    what_to_send,
    with_average,
)
from dmoe_jax.optim.moshpit import MoshpitState, moshpit_average
from dmoe_jax.optim.noloco import NoLoCoState, noloco
from dmoe_jax.optim.peer_axis import FailureRule, distortion, group_mean, moshpit_round, moshpit_rounds, random_cells
from dmoe_jax.optim.recipe import make_optimizer
from dmoe_jax.optim.staleness import compensate_delay, scale_by_stale_adam, scale_by_staleness
from dmoe_jax.optim.streaming_diloco import StreamingDiLoCoState, streaming_diloco

__all__ = [
    "Collaborative",
    "ErrorFeedback",
    "FailureRule",
    "HostState",
    "LossScale",
    "MoshpitState",
    "NoLoCoState",
    "Recipe",
    "Sent",
    "StreamingDiLoCoState",
    "apply_average",
    "averaging_due",
    "collaborative",
    "compensate_delay",
    "compress",
    "distortion",
    "group_mean",
    "host_state",
    "make_optimizer",
    "moshpit_average",
    "moshpit_round",
    "moshpit_rounds",
    "noloco",
    "random_cells",
    "scale_by_stale_adam",
    "scale_by_staleness",
    "sparse_vector",
    "streaming_diloco",
    "what_to_send",
    "with_average",
    "zero_residual",
]
