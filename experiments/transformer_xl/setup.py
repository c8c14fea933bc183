"""A model over a text and how it is trained: what every engine of the experiment is made of, wherever it trains."""

import abc
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.arrays import PyTree, host_copy
from dmoe_jax.data.batches import Batch, SegmentStream, evaluation_segments
from dmoe_jax.data.corpora import Corpus
from dmoe_jax.directory.grid import all_uids, layer_prefix
from dmoe_jax.layer_config import Recipe, Route
from dmoe_jax.model import Evaluation
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import Memory, StepKeys, empty_memory, forget, step_keys
from dmoe_jax.routing.base import Router
from dmoe_jax.training.engine import OnBatch
from dmoe_net.rpc.faults import Fault, FaultPlan
from experiments.transformer_xl import dense
from experiments.transformer_xl.presets import Preset, model_config
from experiments.transformer_xl.settings import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A simulated swarm. The paper's has 32 trainers, 1000 ms of mean delay, and 10 % of the calls fail."""

    place: Literal["simulated", "emulated"] = "simulated"
    """Program that plays it: the code of a real swarm, in virtual time; or one compiled program, which has no nodes and
    no grace time and gives up no call but those that fail."""
    num_trainers: int = 32
    """Asynchronous trainers."""
    concurrency: int | None = None
    """Trainers at work at once, while the others wait for their turn; None: all. With 1 nothing is stale, and the text
    is the one that all read."""
    delay_s: float = 1.0
    """Mean of the exponential delay: of each expert call, and of each step of a dense model. Virtual seconds."""
    failure_rate: float = 0.1
    """Share of expert calls that are never answered."""
    num_nodes: int = 8
    """Hosts that share the experts."""
    slow_node: float = 1.0
    """Factor by which the calls of the first host take longer."""
    grace_s: float = 5.0
    """Virtual seconds that a trainer waits for the other experts after the first has answered: so long that hardly
    a call is lost but those that fail (1 in 150)."""
    timeout_s: float = 30.0
    """After which a call is given up, virtual seconds."""

    def faults(self, seed: int, host: str) -> FaultPlan:
        """Return the faults of the expert calls to a host: node0, node1 and so on."""
        rates = {Fault.LATE: 1 - self.failure_rate, Fault.HANG: self.failure_rate}
        delay_s = self.delay_s * (self.slow_node if host == "node0" else 1.0)
        return FaultPlan(rates=rates, late_mean_s=delay_s, methods=("expert.",), seed=seed)


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
    """Router of every layer of a mixture."""
    route: Route = "sequence"
    """Unit that has experts of its own in a mixture."""
    name: str = ""
    """Name in figures; empty: the model's name."""
    compute_dtype: str = "float32"
    """Dtype of the layers' matrix products, "float32" or "bfloat16"."""
    setting: Setting | None = None
    """The simulated swarm that trains it; None: this device."""
    batch_size: int | None = None
    """Sequences of an update. None: the preset's on this device, 1 for a simulated trainer."""
    staleness_power: float = 0.5
    """Staleness power of both recipes."""

    def __post_init__(self) -> None:
        if self.preset.config.is_mixture != (self.router is not None):
            raise ValueError(f"model {self.preset.model!r} needs a router if it is a mixture of experts, and else none")

    @property
    def title(self) -> str:
        """Name of the model in figures."""
        return self.name or self.preset.model

    @property
    def where(self) -> Place:
        """Place where it is trained."""
        return "local" if self.setting is None else self.setting.place

    @property
    def rows(self) -> int:
        """Sequences of an update."""
        return self.batch_size or (self.preset.batch_size if self.setting is None else 1)

    @functools.cached_property
    def config(self) -> TransformerXLConfig:
        """Sizes of the model over this vocabulary."""
        vocab_size = len(self.corpus.vocabulary)
        return model_config(self.preset, vocab_size, compute_dtype=self.compute_dtype, route=self.route)

    @functools.cached_property
    def layers(self) -> Mapping[str, tuple[str, ...]]:
        """Layer -> uids of its experts; empty for a dense model."""
        prefixes = [layer_prefix(layer) for layer in range(self.config.num_layers) if self.config.is_mixture]
        return {prefix: tuple(map(str, all_uids(prefix, self.config.grid_size))) for prefix in prefixes}

    @property
    def recipe(self) -> Recipe:
        """Recipe of a dense model, or of the trunk."""
        return replace(self.preset.recipe, total_steps=self.steps, staleness_power=self.staleness_power)

    @property
    def expert_recipe(self) -> Recipe:
        """Recipe of each expert."""
        return replace(self.preset.expert_recipe, total_steps=self.steps, staleness_power=self.staleness_power)

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
        """A trainer's training text.

        Raises:
          ValueError: the text is too short for so many rows.
        """
        return SegmentStream(
            self.corpus.train,
            batch_size=self.rows,
            seq_len=self.config.seq_len,
            shard=shard,
            num_shards=num_shards,
            seed=self.seed,
        )

    def step_keys(self, *, trainer: int, step: int) -> StepKeys:
        """The chance of one step of a trainer."""
        return step_keys(num_layers=self.config.num_layers, batch=self.rows, seed=self.seed, trainer=trainer, step=step)


class SetupEngine(abc.ABC):
    """Base of all engines of the experiment. It has most of an `Engine`.

    Args:
      setup: the model, its text and its optimisers.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @property
    def name(self) -> str:
        return self.setup.title

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """Trunk updates so far."""

    @property
    def layers(self) -> Mapping[str, tuple[str, ...]]:
        return self.setup.layers

    @abc.abstractmethod
    def params(self) -> tuple[PyTree, tuple[PyTree, ...]]:
        """(trunk, stacked experts of each layer)."""

    @abc.abstractmethod
    def state(self) -> PyTree:
        """As of `Engine`."""

    async def snapshot(self) -> tuple[int, PyTree]:
        return self.step, host_copy(self.state())

    async def evaluate(self, split: str, *, max_items: int | None, on_batch: OnBatch) -> Evaluation:
        """Compute the loss on this machine, with every expert alive.

        The text is read in segments, memory is carried from one to the next, and every target counts once. A part of
        the text is the beginning of every row, so that it stands for the whole.

        Raises:
          FloatingPointError: the loss is not a number.
        """
        setup = self.setup
        config, rows = setup.config, setup.preset.eval_batch_size
        token_nll, params, ids = _token_nll(config, setup.router), self.params(), getattr(setup.corpus, split)
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


def dense_loss(
    params: PyTree, config: TransformerXLConfig, batch: Batch, memory: Memory, keys: StepKeys
) -> tuple[jax.Array, Memory]:
    """The loss of a dense model's step, and the memory after it."""
    nll, memory = dense.forward(params, config, batch, forget(memory, jnp.asarray(batch.is_first)), keys=keys)
    return jnp.mean(nll), memory


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
