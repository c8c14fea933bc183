"""Training with one large batch that many unequal peers gather together (DeDLOC), for any loop in JAX and Optax.

Peers that come and go gather gradients until all of them together have seen `target_batch_size` samples; then these are
averaged, weighted by samples, and every peer makes the same step: that of one machine with the large batch.

    together = collaborative(optax.lamb(schedule))
    async with open_collaboration(peer, params, together=together, name="run1") as collaboration:
        for batch in batches:
            grads = grad(collaboration.params, batch)                      # jitted
            await collaboration.add(grads, samples=len(batch))             # waits when the whole batch is full
"""

from dmoe_jax.collaboration.collaboration import Collaboration, open_collaboration
from dmoe_jax.collaboration.settings import CollaborationConfig, CollaborationTotals, GlobalStep
from dmoe_jax.collaboration.trainers import CollaborativeTrainers

__all__ = [
    "Collaboration",
    "CollaborationConfig",
    "CollaborationTotals",
    "CollaborativeTrainers",
    "GlobalStep",
    "open_collaboration",
]
