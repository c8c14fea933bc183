"""Training on this device: the whole step of a model in one jitted call, `dmoe` with all its experts.

The fast mode for research on one machine, and the bound on what the swarm can reach: no delay, no failures, no
staleness. The experts learn as they would on their nodes, each with an optimiser and a count of updates of its own,
from the gradient of the same backward pass; one update takes in all sequences of the batch that went to the expert.

The device is never idle: the figures of a step are fetched when the next one is under way.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.checkpoints import host_copy
from dmoe_jax.grid import layer_prefix
from dmoe_jax.mixture.local import init_opt_states
from dmoe_jax.model import Evaluation
from dmoe_jax.models import dense_transformer_xl as dense
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import empty_memory, step_keys
from dmoe_jax.routing.base import Router, RouterError
from dmoe_jax.trainer import StepRecord
from dmoe_jax.training.engine import OnBatch, OnLost, OnStep, Totals
from dmoe_jax.types import PyTree
from experiments.transformer_xl.local_steps import State, StepReport, dense_step, dmoe_step
from experiments.transformer_xl.setup import Setup


class LocalEngine:
    """A model in training on this device, none of whose experts ever fails. An `Engine`.

    Args:
      setup: the model, its text and its optimisers.
      batch_size: sequences of a step.

    Raises:
      RouterError: the router does not keep to its contract. ValueError: the text is too short.
    """

    def __init__(self, setup: Setup, batch_size: int) -> None:
        config, optimizer = setup.config, setup.optimizer
        self._setup = setup
        self._stream = setup.stream(batch_size)
        if not config.is_mixture:
            params = dense.init(jax.random.key(setup.seed), config, word_counts=setup.word_counts)
            memory = empty_memory(config, batch_size)
            self._state: State = {"params": params, "opt_state": optimizer.init(params), "memory": memory}
            self._train_step = dense_step(config, optimizer)
        else:
            assert setup.router is not None
            self._state = local_dmoe_state(
                config,
                setup.router,
                optimizer,
                setup.expert_optimizer,
                batch_size=batch_size,
                seed=setup.seed,
                word_counts=setup.word_counts,
            )
            self._train_step = dmoe_step(config, setup.router, optimizer, setup.expert_optimizer)
        self._step = self._items = 0

    @property
    def name(self) -> str:
        return self._setup.title

    @property
    def step(self) -> int:
        return self._step

    @property
    def layers(self) -> Mapping[str, tuple[str, ...]]:
        return self._setup.layers

    async def advance(self, num_steps: int, on_step: OnStep, on_lost: OnLost) -> None:
        """Make `num_steps` updates, none of which is ever lost; `on_step` is one update behind the device."""
        waiting: tuple[int, StepReport, int] | None = None
        for _ in range(num_steps):
            batch = next(self._stream)
            keys = step_keys(
                num_layers=self._setup.config.num_layers,
                batch=batch.tokens.shape[0],
                seed=self._setup.seed,
                trainer=0,
                step=self._step,
            )
            self._state, report = self._train_step(self._state, batch, keys)
            self._step += 1
            self._items += int(batch.targets.size)
            if waiting is not None:
                on_step(self._record(*waiting))
            waiting = (self._step, report, int(batch.targets.size))
        if waiting is not None:
            on_step(self._record(*waiting))

    def _record(self, step: int, report: StepReport, items: int) -> StepRecord:
        """Wait for a step's figures and look at them."""
        nll, is_finite, hidden_sound, scores_sound = jax.device_get(report)
        for layer in range(len(scores_sound)):
            if not hidden_sound[layer]:
                break  # what follows is a consequence
            if not scores_sound[layer] and self._setup.router is not None:
                raise RouterError(
                    f"router {self._setup.router.name!r}: its scores or its auxiliary loss in {layer_prefix(layer)} "
                    f"are not finite numbers in step {step} of {self.name}"
                )
        if not is_finite:
            raise FloatingPointError(f"{self.name}: loss {nll} of step {step}, or its gradient, is not finite")
        return StepRecord(step=step, trainer=0, loss=float(nll), items=items, staleness=0)

    async def evaluate(self, split: str, *, max_items: int | None, on_batch: OnBatch) -> Evaluation:
        state = self._state
        params = (state["trunk"], state["experts"]) if self.layers else state["params"]
        return self._setup.evaluator(params, self._setup.text(split), max_tokens=max_items, on_batch=on_batch)

    def state(self) -> PyTree:
        return self._state

    async def snapshot(self) -> tuple[int, PyTree]:
        return self._step, host_copy(self._state)

    def facts(self) -> dict[str, Any]:
        return {"items": self._items, "position": self._stream.position}

    def load(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        # Copies: the first step donates them, and an array of the caller's may lie under a borrowed one.
        self._state = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)
        self._step, self._items = step, facts["items"]
        self._stream.seek(facts["position"])

    def totals(self) -> Totals:
        load: dict[str, int] = {}
        for number, uids in enumerate(self.layers.values()):
            counts = np.asarray(self._state["load"][number])
            load |= {uid: int(count) for uid, count in zip(uids, counts, strict=True)}
        return Totals(items=self._items, load=load)


def local_dmoe_state(
    config: TransformerXLConfig,
    router: Router,
    optimizer: optax.GradientTransformation,
    expert_optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    seed: int,
    word_counts: np.ndarray | None = None,
) -> State:
    """The initial state for `dmoe_step`.

    Args:
      config: sizes of the model. router: of every layer.
      optimizer: of the trunk. expert_optimizer: of each expert.
      batch_size: sequences of a step.
      seed: of the parameters.
      word_counts: of the training text, for the initial output biases; None: zeros.

    Raises:
      RouterError: the router does not keep to its contract.
    """
    key = jax.random.key(seed)
    trunk = txl.init_trunk(key, config, router, word_counts=word_counts)
    experts = txl.init_experts(key, config)
    return {
        "trunk": trunk,
        "trunk_opt_state": optimizer.init(trunk),
        "experts": experts,
        "expert_opt_states": tuple(init_opt_states(expert_optimizer, layer) for layer in experts),
        "memory": empty_memory(config, batch_size),
        "load": jnp.zeros((config.num_layers, math.prod(config.grid_size)), jnp.int32),
    }
