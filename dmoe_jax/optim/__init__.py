"""What decentralised training asks of optimisers, averaging and stale gradients: pure JAX and pure Optax.

- `moshpit_average` makes of any Optax optimiser one whose parameters, gradients or pseudo-gradients (DiLoCo) are
  averaged with other peers'; `dmoe_jax.averaging` carries them over the network.
- `moshpit_round` and its like average over a leading axis of simulated peers, on one device or split over a mesh.
- `streaming_diloco` and `noloco` are optimisers that send less, or at other times; they leave averaging to the host as
  `moshpit_average` does (`host_state`). `ErrorFeedback` compresses what `moshpit_average` sends (`compression`).
- `scale_by_staleness` makes the updates of stale gradients smaller; `scale_by_stale_adam` is Adam that gives them no
  momentum; `compensate_delay` corrects them.

Nothing here opens a connection, waits or starts a task. Of `net` it uses the rule by which groups follow from a grid.
"""

from dmoe_jax.optim.compression import (
    Compressed,
    ErrorFeedback,
    compress,
    sparse_vector,
    zero_residual,
)
from dmoe_jax.optim.host_state import (
    HostState,
    Sent,
    apply_average,
    averaging_due,
    host_state,
    what_to_send,
    with_average,
)
from dmoe_jax.optim.moshpit import moshpit_average
from dmoe_jax.optim.moshpit_state import MoshpitState
from dmoe_jax.optim.noloco import NoLoCoState, noloco
from dmoe_jax.optim.peer_axis import (
    FailureRule,
    distortion,
    group_mean,
    moshpit_round,
    moshpit_rounds,
    random_cells,
)
from dmoe_jax.optim.staleness import compensate_delay, scale_by_stale_adam, scale_by_staleness
from dmoe_jax.optim.streaming_diloco import StreamingDiLoCoState, streaming_diloco

__all__ = [
    "Compressed",
    "ErrorFeedback",
    "FailureRule",
    "HostState",
    "MoshpitState",
    "NoLoCoState",
    "Sent",
    "StreamingDiLoCoState",
    "apply_average",
    "averaging_due",
    "compensate_delay",
    "compress",
    "distortion",
    "group_mean",
    "host_state",
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
