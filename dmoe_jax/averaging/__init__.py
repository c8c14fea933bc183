"""A peer's part in averaging over the network, for any training loop in JAX and Optax.

    optimizer = moshpit_average(optax.adamw(3e-4), every=25, what="pseudo_gradients")
    async with swarm.averager(params, optimizer, name="run1") as averager:      # of `dmoe_jax.open_swarm`
        opt_state = optimizer.init(params)
        for batch in batches:
            params, opt_state = train_step(params, opt_state, batch)      # jitted, calls optimizer.update
            opt_state = await averager.step(opt_state, params)            # never waits for the network

A round that is due begins in `step` and runs beside the training; a later `step` puts its outcome into the state, and
the update after that applies it (see `dmoe_jax.optim.moshpit`). A round that is lost, because nobody was met, the
network failed or a number was not finite, is counted with its reason, and training goes on.

Where more than parameters and optimiser state belongs to a peer's state, peers offer theirs by `state=`:

    async with swarm.averager(..., state=lambda: (step, (params, opt_state))) as averager:
        taken = await averager.catch_up(step, (params, opt_state), min_lead=25)     # also when `is_left_behind`
        if taken is not None:
            step, (params, opt_state) = taken
"""

from dmoe_jax.averaging.settings import AveragingTotals, Round, TreeAveragerConfig
from dmoe_jax.averaging.tree_averager import MISSED_BEFORE_CATCHING_UP, TreeAverager, open_tree_averager
from dmoe_net.averaging.speeds import Speeds

__all__ = [
    "MISSED_BEFORE_CATCHING_UP",
    "AveragingTotals",
    "Round",
    "Speeds",
    "TreeAverager",
    "TreeAveragerConfig",
    "open_tree_averager",
]
