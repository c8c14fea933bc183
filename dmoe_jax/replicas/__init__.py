"""Several nodes serve the same experts on purpose: they share the load, and one of them may die unnoticed.

    await swarm.serve({"ffn.[0:4].[0:4]": expert}, optimizer=adam, replicas=ReplicaConfig())      # on each of them

Each node stands in a *slot* of each expert (`directory.slots`, `slot_claims`), and trainers spread over them by
themselves. A node that comes takes the state of one that serves (`state`). Every `average_period_s` the copies are
averaged (`averaging`), each counting as the updates that it has taken meanwhile: after it all have learnt from all
gradients.

What is averaged and why is in `copies`; who averages with whom, and in which order, in `rounds`.
"""

from dmoe_jax.replicas.config import ReplicaConfig
from dmoe_jax.replicas.replicas import Replicas, replicating
from dmoe_jax.replicas.state import fetch_state

__all__ = ["ReplicaConfig", "Replicas", "fetch_state", "replicating"]
