"""Training on this device: the whole step of a model in one jitted call, `dmoe` with all its experts.

The fast mode for research on one machine, and the bound on what the swarm can reach: no delay, no failures, no
staleness. The experts learn as they would on their nodes, each with an optimiser and a count of updates of its own,
from the gradient of the same backward pass; one update takes in all sequences of the batch that went to the expert.

The device is never idle: the figures of a step are fetched when the next one is under way.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.data.batches import SegmentStream
from dmoe_jax.grid import all_uids, layer_prefix
from dmoe_jax.mixture.local import init_opt_states
from dmoe_jax.model import Evaluation
from dmoe_jax.models import dense_transformer_xl as dense
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import empty_memory, step_keys
from dmoe_jax.routing.base import Router, RouterError
from dmoe_jax.trainer import StepRecord
from dmoe_jax.types import PyTree
from experiments.transformer_xl.engine import Totals
from experiments.transformer_xl.evaluation import EvaluationConfig, Evaluator, dense_evaluator, dmoe_evaluator
from experiments.transformer_xl.local_steps import State, StepReport, TrainStep, dense_step, dmoe_step


class LocalEngine:
    """A model in training on this device. An `Engine`; made by `local_dense` and `local_dmoe`.

    Args:
      name: what figures call it.
      state: all that a step changes; donated to the first one.
      train_step: (state, batch, keys) -> (state, StepReport), jitted, the state donated.
      evaluate: on `params_of(state)`.
      params_of: state -> what the evaluator takes.
      stream: the text, all rows.
      num_layers: of the model, for the keys of a step.
      uids: of each layer's experts, for the load; () for a dense model.
      router: for error messages; None for a dense model.
      seed: of the dropout masks and the router's noise.
    """

    def __init__(
        self,
        *,
        name: str,
        state: State,
        train_step: TrainStep,
        evaluate: Evaluator,
        params_of: Callable[[State], PyTree],
        stream: SegmentStream,
        num_layers: int,
        seed: int,
        uids: tuple[tuple[str, ...], ...] = (),
        router: Router | None = None,
    ) -> None:
        self.name = name
        self._state = state
        self._train_step = train_step
        self._evaluate = evaluate
        self._params_of = params_of
        self._stream = stream
        self._num_layers = num_layers
        self._seed = seed
        self._uids = uids
        self._router = router
        self._step = 0
        self._tokens = 0

    @property
    def step(self) -> int:
        """Updates so far."""
        return self._step

    def advance(self, num_steps: int, on_step: Callable[[StepRecord], None]) -> None:
        """See `Engine.advance`. `on_step` is one update behind the device."""
        waiting: tuple[int, StepReport] | None = None
        for _ in range(num_steps):
            batch = next(self._stream)
            rows = batch.tokens.shape[0]
            keys = step_keys(num_layers=self._num_layers, batch=rows, seed=self._seed, trainer=0, step=self._step)
            self._state, report = self._train_step(self._state, batch, keys)
            self._step += 1
            self._tokens += int(batch.targets.size)
            if waiting is not None:
                on_step(self._record(*waiting, tokens=int(batch.targets.size)))
            waiting = (self._step, report)
        if waiting is not None:
            on_step(self._record(*waiting, tokens=int(batch.targets.size)))

    def _record(self, step: int, report: StepReport, *, tokens: int) -> StepRecord:
        """Wait for a step's figures and look at them."""
        nll, is_finite, hidden_sound, scores_sound = jax.device_get(report)
        for layer in range(len(scores_sound)):
            if not hidden_sound[layer]:
                break  # what follows is a consequence
            if not scores_sound[layer] and self._router is not None:
                raise RouterError(
                    f"router {self._router.name!r}: its scores or its auxiliary loss in {layer_prefix(layer)} are not "
                    f"finite numbers in step {step} of {self.name}"
                )
        if not is_finite:
            raise FloatingPointError(f"{self.name}: loss {nll} of step {step}, or its gradient, is not finite")
        return StepRecord(step=step, trainer=0, loss=float(nll), items=tokens, staleness=0)

    def evaluate(
        self, ids: np.ndarray, *, max_tokens: int | None, on_batch: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """See `Engine.evaluate`."""
        return self._evaluate(self._params_of(self._state), ids, max_tokens=max_tokens, on_batch=on_batch)

    def state(self) -> PyTree:
        """See `Engine.state`."""
        return self._state

    def facts(self) -> dict[str, Any]:
        """See `Engine.facts`."""
        return {"step": self._step, "tokens": self._tokens, "position": self._stream.position}

    def load(self, state: PyTree, facts: Mapping[str, Any]) -> None:
        """See `Engine.load`."""
        # Copies: the first step donates them, and an array of the caller's may lie under a borrowed one.
        self._state = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)
        self._step, self._tokens = facts["step"], facts["tokens"]
        self._stream.seek(facts["position"])

    def totals(self) -> Totals:
        """See `Engine.totals`. Nothing is stale and no call is made."""
        load: dict[str, int] = {}
        if self._uids:
            counts = np.asarray(self._state["load"])
            for uids, samples in zip(self._uids, counts, strict=True):
                load |= {uid: int(count) for uid, count in zip(uids, samples, strict=True)}
        return Totals(tokens=self._tokens, load=load)


def local_dense(
    *,
    name: str,
    config: TransformerXLConfig,
    ids: np.ndarray,
    word_counts: np.ndarray | None,
    optimizer: optax.GradientTransformation,
    batch_size: int,
    evaluation: EvaluationConfig,
    seed: int,
) -> LocalEngine:
    """A dense Transformer-XL.

    Args:
      name: what figures call it.
      config: sizes of the model.
      ids: the training text.
      word_counts: of the training text, for the initial output biases; None: zeros.
      optimizer: of all parameters.
      batch_size: sequences of a step.
      evaluation: how validation text is read.
      seed: of parameters, dropout and the rows' places in the text.
    """
    params = dense.init(jax.random.key(seed), config, word_counts=word_counts)
    state = {"params": params, "opt_state": optimizer.init(params), "memory": empty_memory(config, batch_size)}
    return LocalEngine(
        name=name,
        state=state,
        train_step=dense_step(config, optimizer),
        evaluate=dense_evaluator(config, evaluation),
        params_of=lambda state: state["params"],
        stream=SegmentStream(ids, batch_size=batch_size, seq_len=config.seq_len, seed=seed),
        num_layers=config.num_layers,
        seed=seed,
    )


def local_dmoe(
    *,
    name: str,
    config: TransformerXLConfig,
    router: Router,
    ids: np.ndarray,
    word_counts: np.ndarray | None,
    optimizer: optax.GradientTransformation,
    expert_optimizer: optax.GradientTransformation,
    batch_size: int,
    evaluation: EvaluationConfig,
    seed: int,
) -> LocalEngine:
    """A DMoE Transformer-XL with all its experts, none of which ever fails.

    Args: as of `local_dense`; router: of every layer; optimizer: of the trunk; expert_optimizer: of each expert.

    Raises:
      RouterError: the router does not keep to its contract.
    """
    return LocalEngine(
        name=name,
        state=local_dmoe_state(
            config,
            router,
            optimizer,
            expert_optimizer,
            batch_size=batch_size,
            seed=seed,
            word_counts=word_counts,
        ),
        train_step=dmoe_step(config, router, optimizer, expert_optimizer),
        evaluate=dmoe_evaluator(config, router, evaluation),
        params_of=lambda state: (state["trunk"], state["experts"]),
        stream=SegmentStream(ids, batch_size=batch_size, seq_len=config.seq_len, seed=seed),
        num_layers=config.num_layers,
        seed=seed,
        uids=tuple(
            tuple(str(uid) for uid in all_uids(layer_prefix(layer), config.grid_size))
            for layer in range(config.num_layers)
        ),
        router=router,
    )


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
    """The initial state for `dmoe_step`. Args: as of `local_dmoe`."""
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
