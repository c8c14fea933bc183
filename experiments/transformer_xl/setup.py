"""A model over a text and how it is trained: what every engine of the experiment is made of, wherever it trains."""

import abc
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax import Evaluation
from dmoe_jax.arrays import PyTree, host_copy
from dmoe_jax.data import Batch, Corpus, SegmentStream, evaluation_segments
from dmoe_jax.directory.grid import all_uids, layer_prefix
from dmoe_jax.models import TransformerXLConfig
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.trunk import Memory, StepKeys, empty_memory, step_keys
from dmoe_jax.optim import Recipe
from dmoe_jax.routing import Router
from dmoe_jax.trainer import OnLost, OnStep
from dmoe_jax.training.engine import OnBatch, Totals
from experiments.transformer_xl import dense
from experiments.transformer_xl.presets import ON_THIS_DEVICE, Preset, model_config
from experiments.transformer_xl.settings import Place, TrainingSettings

_EVAL_ROWS = 10
"""Rows in which a text is evaluated, each from another place of it. Their first words lack the memory of what came
before them."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model over a text, and how it is trained: a preset with the schedules of a run."""

    preset: Preset
    """The model."""
    corpus: Corpus
    """The text."""
    steps: int
    """Updates of the whole run, for the schedules."""
    seed: int
    """Seed of parameters, dropout, the router's noise and the rows' places in the text."""
    router: Router | None = None
    """Router of every layer of a mixture; None for a dense model."""
    name: str = ""
    """Name in figures; empty: the model's name."""
    settings: TrainingSettings = ON_THIS_DEVICE
    """Place, batch, routed unit and precision. (Their sizes and rates are in the preset already.)"""

    @property
    def where(self) -> Place:
        """Place where it is trained; a dense model has no swarm that could be emulated."""
        place = self.settings.place
        return "simulated" if place == "emulated" and self.router is None else place

    @property
    def rows(self) -> int:
        """Sequences of an update."""
        return self.settings.batch_size or (1 if self.settings.is_asynchronous else self.preset.batch_size)

    @functools.cached_property
    def config(self) -> TransformerXLConfig:
        """Sizes of the model over this vocabulary."""
        return model_config(self.preset, len(self.corpus.vocabulary), self.settings)

    @functools.cached_property
    def layers(self) -> Mapping[str, tuple[str, ...]]:
        """Layer -> uids of its experts; empty for a dense model."""
        prefixes = [layer_prefix(layer) for layer in range(self.config.num_layers) if self.config.is_mixture]
        return {prefix: tuple(map(str, all_uids(prefix, self.config.grid_size))) for prefix in prefixes}

    @property
    def recipe(self) -> Recipe:
        """Recipe of a dense model, or of the trunk."""
        return self._over_steps(self.preset.recipe)

    @property
    def expert_recipe(self) -> Recipe:
        """Recipe of each expert."""
        return self._over_steps(self.preset.expert_recipe)

    def _over_steps(self, recipe: Recipe) -> Recipe:
        """The recipe with the warm-up that a short run has: see `learning_rate_schedule`."""
        return replace(recipe, warmup_steps=min(recipe.warmup_steps, self.steps // 4), total_steps=self.steps)

    def init_trunk(self) -> PyTree:
        """Initial parameters of everything but the experts: of a dense model, all.

        Raises:
          RouterError: the router does not keep to its contract.
        """
        word_counts = None
        if self.preset.unigram_biases:
            word_counts = np.bincount(self.corpus.train, minlength=self.config.vocab_size)
        key = jax.random.key(self.seed)
        if self.router is None:
            return dense.init(key, self.config, word_counts=word_counts)
        return txl.init_trunk(key, self.config, self.router, word_counts=word_counts)

    def stream(self, *, shard: int = 0, num_shards: int = 1) -> SegmentStream:
        """A trainer's training text. Raises ValueError where it is too short for so many rows."""
        sizes = {"batch_size": self.rows, "seq_len": self.config.seq_len}
        return SegmentStream(self.corpus.train, **sizes, shard=shard, num_shards=num_shards, seed=self.seed)

    def streams(self) -> list[SegmentStream]:
        """The texts of all slow trainers."""
        num = self.settings.trainers
        return [self.stream(shard=index, num_shards=num) for index in range(num)]

    def step_keys(self, *, trainer: int, step: int) -> StepKeys:
        """The chance of one step of a trainer."""
        return step_keys(num_layers=self.config.num_layers, batch=self.rows, seed=self.seed, trainer=trainer, step=step)


class SetupEngine(abc.ABC):
    """Base of all engines of the experiment: most of an `Engine`, made of a setup."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.name, self.layers = setup, setup.name or setup.preset.model, setup.layers
        self.step = 0
        """Trunk updates so far."""
        self._state: Any = None

    @abc.abstractmethod
    def params(self) -> tuple[PyTree, tuple[PyTree, ...]]:
        """(trunk, stacked experts of each layer)."""

    @abc.abstractmethod
    async def advance(self, num_steps: int, on_step: OnStep, on_lost: OnLost) -> None:
        """As of `Engine`."""

    @abc.abstractmethod
    def totals(self) -> Totals:
        """As of `Engine`."""

    def state(self) -> PyTree:
        """As of `Engine`; so are the others."""
        return self._state

    async def snapshot(self) -> tuple[int, PyTree]:
        return self.step, host_copy(self.state())

    def facts(self) -> dict[str, Any]:
        return {}

    def load(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        # Copies: the next step donates them, and an array of the caller's may lie under a borrowed one.
        self._take(step, jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state))

    def _take(self, step: int, state: Any) -> None:
        self.step, self._state = step, state

    async def evaluate(self, split: str, *, max_items: int | None, on_batch: OnBatch, params: Any = None) -> Evaluation:
        """Compute the loss on this machine, with every expert alive, of these parameters or, by default, the last.

        The text is read in segments, memory is carried from one to the next, and every target counts once. A part of
        the text is the beginning of every row, so that it stands for the whole.

        Raises:
          FloatingPointError: the loss is not a number.
        """
        setup = self.setup
        config, rows = setup.config, _EVAL_ROWS
        token_nll, ids = _token_nll(config, setup.router), getattr(setup.corpus, split)
        params = self.params() if params is None else params
        memory = empty_memory(config, rows)
        total, counted = 0.0, []
        wanted = ids.size - 1 if max_items is None else min(max_items, ids.size - 1)
        num_batches = -(-wanted // (rows * config.seq_len))
        batches = evaluation_segments(ids, batch_size=rows, seq_len=config.seq_len)
        for number, batch in zip(range(1, num_batches + 1), batches, strict=False):
            nll, memory = token_nll(params, batch, memory)
            total += float(np.asarray(jnp.where(batch.mask, nll, 0)).sum(dtype=np.float64))
            counted.append(batch.targets[batch.mask])
            on_batch(number, num_batches)
        targets = np.concatenate(counted)
        if not np.isfinite(total):
            raise FloatingPointError(f"the loss over {targets.size} words is {total / targets.size}")
        return Evaluation(loss=total / targets.size, items=int(targets.size), targets=targets)


class BestValidation:
    """An engine whose test figures are those of the parameters with the least validation loss so far, as the authors'.

    Those parameters are part of its state. A validation over another part of the text than the first does not count.
    """

    def __init__(self, engine: SetupEngine) -> None:
        self._engine, self.name, self.layers = engine, engine.name, engine.layers
        self.advance = engine.advance
        self._best: dict[str, Any] = {"step": 0, "loss": None, "items": None}
        self._params = host_copy(engine.params())

    @property
    def step(self) -> int:
        """As of `Engine`; so are the others."""
        return self._engine.step

    def params(self) -> tuple[PyTree, tuple[PyTree, ...]]:
        """(trunk, stacked experts of each layer), the last ones."""
        return self._engine.params()

    def state(self) -> PyTree:
        own = self._engine.state()
        # Beside the engine's own, whose names `dmoe inspect` reads in a checkpoint.
        return {**(own if isinstance(own, Mapping) else own._asdict()), "best": self._params}

    async def snapshot(self) -> tuple[int, PyTree]:
        return self.step, host_copy(self.state())

    def facts(self) -> dict[str, Any]:
        return {"engine": self._engine.facts(), "best": self._best}

    def load(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        own = {name: value for name, value in state.items() if name != "best"}
        self._engine.load(step, type(self._engine.state())(**own), facts["engine"])
        self._params, self._best = host_copy(state["best"]), dict(facts["best"])

    def totals(self) -> Totals:
        totals = self._engine.totals()
        return replace(totals, figures={**totals.figures, "best_validation_step": self._best["step"]})

    async def evaluate(self, split: str, *, max_items: int | None, on_batch: OnBatch) -> Evaluation:
        params = self._params if split == "test" and self._best["loss"] is not None else self.params()
        found = await self._engine.evaluate(split, max_items=max_items, on_batch=on_batch, params=params)
        first, least = (self._best[name] for name in ("items", "loss"))
        if split == "valid" and (least is None or (found.items == first and found.loss < least)):
            self._best = {"step": self.step, "loss": found.loss, "items": found.items}
            self._params = host_copy(params)
        return found


@functools.cache
def _token_nll(config: TransformerXLConfig, router: Router | None) -> Callable[[PyTree, Batch, Memory], Any]:
    """The compiled ((trunk, experts), batch, memory) -> (negative log-likelihood of each target, next memory)."""

    def token_nll(params: tuple[PyTree, Any], batch: Batch, memory: Memory) -> tuple[Any, Memory]:
        trunk, experts = params
        if router is None:
            return dense.forward(trunk, config, batch, memory)
        _, aux = txl.local_forward(trunk, experts, config, router, batch, memory)
        return aux.token_nll, aux.memory

    return jax.jit(token_nll)
