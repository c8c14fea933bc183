"""Training with one large batch that many unequal peers gather together (DeDLOC), for any loop in JAX and Optax.

This is for whoever would use `hivemind.Optimizer` with PyTorch. Peers that come and go gather gradients until all of
them together have seen `target_batch_size` samples; then these are averaged, weighted by samples, and every peer makes
the same step: that of one machine with the large batch.

    together = collaborative(optax.lamb(schedule))
    async with open_collaboration(rpc, dht, params, together=together, name="run1") as peer:
        for batch in batches:
            grads = grad(peer.params, batch)                      # jitted
            await peer.add(grads, samples=len(batch))             # waits when the whole batch is full

`step` counts the swarm's steps, and so do schedules. A newcomer takes the state of somebody who is there; one that fell
behind does again; one that dies costs the others what it had gathered.
"""

from dmoe_jax.collaboration.collaboration import Collaboration, open_collaboration
from dmoe_jax.collaboration.settings import CollaborationConfig, CollaborationTotals, GlobalStep

__all__ = ["Collaboration", "CollaborationConfig", "CollaborationTotals", "GlobalStep", "open_collaboration"]
