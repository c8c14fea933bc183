"""A peer's part in averaging over the network, for any training loop in JAX and Optax.

This is for whoever would use `hivemind.Optimizer` with PyTorch: a loop of one's own, on machines of one's own, whose
parameters, gradients or pseudo-gradients (DiLoCo) are averaged with those of others who come and go.

    optimizer = moshpit_average(optax.adamw(3e-4), every=25, what="pseudo_gradients")
    async with swarm.averager(params, optimizer, name="run1") as averager:      # of `dmoe_jax.open_swarm`
        opt_state = optimizer.init(params)
        for batch in batches:
            params, opt_state = train_step(params, opt_state, batch)      # jitted, calls optimizer.update
            opt_state = await averager.step(opt_state, params)            # never waits for the network

A round that is due begins in `step` and runs beside the training; a later `step` puts its outcome into the state, and
the update after that applies it (see `dmoe_jax.optim.moshpit`). A round that is lost, because nobody was met, the
network failed or a number was not finite, is counted with its reason, and training goes on.

A newcomer takes the whole state of the peer that is furthest. Peers offer theirs by `state=`:

    async with swarm.averager(..., state=lambda: (step, (params, opt_state))) as averager:
        taken = await averager.catch_up(step, (params, opt_state), min_lead=25)
        if taken is not None:
            step, (params, opt_state) = taken

In the loop the same is worth it whenever `averager.is_left_behind`.

Peers of another model under the same name are not met, and both are told. Names, shapes and the averaging tell models
apart by themselves; what else the numbers stand for only their user knows:

    config = TreeAveragerConfig(meaning=f"labels: {', '.join(labels)}")

On a line that is thin only the largest changes need to travel, in two bits each, while the rest is kept for later
(SparseLoCo). Members then gather each other's payloads, and nobody reduces for others:

    feedback = ErrorFeedback()                                      # of dmoe_jax.optim
    optimizer = moshpit_average(
        optax.adamw(3e-4), every=25, what="pseudo_gradients", outer=optax.sgd(1.0), compress=feedback
    )

What is kept is in the optimiser's state, and so in checkpoints. A lost round changes nothing of it.

What hivemind has and this has not: a target batch size, with peers that accumulate gradients until all of them together
have seen so many samples. Here each peer counts its own updates.
"""

from dmoe_jax.averaging.settings import AveragingTotals, Round, TreeAveragerConfig
from dmoe_jax.averaging.tree_averager import MISSED_BEFORE_CATCHING_UP, TreeAverager, open_tree_averager
from net.averaging.speeds import Speeds

__all__ = [
    "MISSED_BEFORE_CATCHING_UP",
    "AveragingTotals",
    "Round",
    "Speeds",
    "TreeAverager",
    "TreeAveragerConfig",
    "open_tree_averager",
]
