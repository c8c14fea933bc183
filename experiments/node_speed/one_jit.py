"""The demonstration's model with all its experts in one process, a helper of the measurement: what a swarm is compared
with.

Its step is one jitted program: the trunk's forward and backward, those of the chosen experts, and an update of the
trunk and of each of these. Told {"steps": ...} it makes so many and says how many a second.
"""

import itertools
import time
from typing import Any

import jax
import numpy as np
import optax

from dmoe_jax.data.batches import SegmentStream
from dmoe_jax.data.corpora import load_corpus
from dmoe_jax.layer_config import Recipe, Route
from dmoe_jax.mixture.local_update import chosen_value_and_grad, init_opt_states, update_chosen
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import empty_memory
from dmoe_jax.optim.recipe import make_optimizer
from dmoe_jax.routing.registry import make_router
from dmoe_jax.runs.setting_up import set_up_jax
from experiments.node_speed.cases import DEMONSTRATION
from experiments.processes import orders, run_helper, say


class OneJit:
    """The model, its state, and the text that it goes through.

    Args:
      route, router: as of `dmoe train`.
      data: corpus.
      seed: of parameters and of the place in the text.
    """

    def __init__(self, *, route: Route, router: str, data: str, seed: int) -> None:
        corpus = load_corpus(source=data)
        vocab_size = len(corpus.vocabulary)
        sizes = DEMONSTRATION
        cutoffs = tuple(cutoff for cutoff in sizes.cutoffs if cutoff < vocab_size)
        self._config = config = TransformerXLConfig(
            vocab_size=vocab_size,
            num_layers=sizes.num_layers,
            grid_size=sizes.grid_size,
            k_best=sizes.k_best,
            cutoffs=cutoffs,
            route=route,
        )
        own = make_router(router, config.grid_size)
        # Rates and schedules do not change what a step costs.
        optimizer = make_optimizer(Recipe(total_steps=None))

        def loss(trunk: Any, experts: Any, batch: Any, memory: Any) -> Any:
            return txl.local_forward(trunk, experts, config, own, batch, memory)

        gradient = chosen_value_and_grad(loss)

        def step(state: Any, batch: Any) -> Any:
            trunk, opt_state, experts, expert_states, memory = state
            (value, aux), (grads, expert_grads) = gradient(trunk, experts, batch, memory)
            updates, opt_state = optimizer.update(grads, opt_state, trunk)
            stepped = [
                update_chosen(optimizer, own, own_state, own_grads, layer.load > 0)
                for own, own_state, own_grads, layer in zip(
                    experts, expert_states, expert_grads, aux.layers, strict=True
                )
            ]
            trunk = optax.apply_updates(trunk, updates)
            experts, expert_states = [new for new, _ in stepped], [new for _, new in stepped]
            return (trunk, opt_state, experts, expert_states, aux.memory), value

        trunk_key, expert_key = jax.random.split(jax.random.key(seed))
        trunk = txl.init_trunk(trunk_key, config, own)
        experts = list(txl.init_experts(expert_key, config))
        states = [init_opt_states(optimizer, each) for each in experts]
        self._state = (trunk, optimizer.init(trunk), experts, states, empty_memory(config, sizes.batch_size))
        self._step = jax.jit(step, donate_argnums=0)
        self._batches = SegmentStream(
            corpus.train, batch_size=sizes.batch_size, seq_len=config.layer.seq_len, shard=0, num_shards=1, seed=seed
        )

    def steps_per_s(self, steps: int) -> float:
        """Make so many steps; how many in a second.

        Raises:
          FloatingPointError: the loss is not finite.
        """
        began = time.perf_counter()
        for batch in itertools.islice(self._batches, steps):
            self._state, value = self._step(self._state, batch)
            if not np.isfinite(value):  # waits for it, as a trainer does that reports its loss
                raise FloatingPointError(f"the loss became {value}")
        return steps / (time.perf_counter() - began)


async def serve(*, route: Route, router: str, data: str, seed: int) -> None:
    """Make steps whenever that is ordered, until standard input closes."""
    set_up_jax()
    model = OneJit(route=route, router=router, data=data, seed=seed)
    model.steps_per_s(1)  # compiles
    say(ready=True)
    async for order in orders():
        say(steps_per_s=model.steps_per_s(order["steps"]))


if __name__ == "__main__":
    run_helper(serve)
