"""Models of `dmoe train`: the Transformer-XL that its flags describe, or a model of the user's own."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import optax
import trio

from dmoe_jax.cli.train_options import TrainOptions
from dmoe_jax.data.batches import SegmentStream, evaluation_segments
from dmoe_jax.data.corpora import load_corpus
from dmoe_jax.directory.grid import all_uids, layer_prefix
from dmoe_jax.experts.user_file import UserFileError, call_user, user_model, user_optimizer
from dmoe_jax.layer_config import Recipe
from dmoe_jax.mixture.remote import RemoteMixture
from dmoe_jax.model import AnyModel, Model
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.transformer_xl import TransformerXL
from dmoe_jax.optim.recipe import make_optimizer
from dmoe_jax.routing.check import check_router
from dmoe_jax.routing.registry import make_router
from dmoe_jax.runs.endings import mistakes_in_one_line
from dmoe_jax.swarm.swarm import Swarm
from dmoe_jax.training.progress import TrainingProgress
from dmoe_jax.training.swarm_engine import EvaluationBatches
from dmoe_jax.training.task import Task, language_task

_EVAL_BATCH = 16
"""Rows of an evaluation batch, each from another place of the text: enough places for a part to stand for the whole."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run's model, the batches of its trainers, and its evaluation."""

    model: AnyModel
    task: Task
    batches: list[Iterator[Any]]
    """One iterator for each trainer."""
    evaluation: EvaluationBatches
    facts: Mapping[str, object]
    """Beginning of the headline."""

    @property
    def mixtures(self) -> tuple[RemoteMixture, ...]:
        """The model's remote mixtures, if it has them in an attribute of this name."""
        return tuple(getattr(self.model, "mixtures", ()))

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """Layer -> uids of its experts."""
        grids = {mixture.config.prefix: mixture.router.grid_size for mixture in self.mixtures}
        return {prefix: tuple(map(str, all_uids(prefix, grid_size))) for prefix, grid_size in grids.items()}


async def language_training(options: TrainOptions, swarm: Swarm, progress: TrainingProgress) -> Training:
    """The Transformer-XL of the flags; raises UsageError for a router, a corpus or sizes that will not do."""
    data, language = options.data, options.language
    with progress.phase("loading the corpus"), mistakes_in_one_line():
        corpus = await trio.to_thread.run_sync(lambda: load_corpus(source=data.data), abandon_on_cancel=True)
    progress.say(f"corpus: {corpus.description}")
    seed, seq_len, shards = data.chance_seed, language.layer.seq_len, range(data.num_trainers)
    with mistakes_in_one_line():
        config = trunk_config(options, len(corpus.vocabulary))
        router = make_router(language.router, language.grid_size)
        mixtures = [
            swarm.mixture(layer_prefix(layer), config.expert(), router, config=options.calls, seed=seed)
            for layer in range(config.num_layers)
        ]
        stream = partial(SegmentStream, corpus.train, batch_size=data.batch_size, seq_len=seq_len, seed=seed)
        streams: list[Iterator[Any]] = [stream(shard=shard, num_shards=len(shards)) for shard in shards]

    def evaluation(split: str, max_items: int | None) -> tuple[Iterable[Any], int | None]:
        text: np.ndarray = getattr(corpus, split)
        num_batches = math.ceil(min(max_items or text.size, text.size) / (_EVAL_BATCH * seq_len))
        batches = evaluation_segments(text, batch_size=_EVAL_BATCH, seq_len=seq_len)
        return itertools.islice(batches, num_batches), num_batches

    counts = np.bincount(corpus.train, minlength=config.vocab_size)
    return Training(
        model=TransformerXL(config, router, mixtures, word_counts=counts, words=corpus.vocabulary.meaning),
        task=language_task(corpus),
        batches=streams,
        evaluation=evaluation,
        facts={"router": router.name, "trainers": data.num_trainers},
    )


def trunk_optimizer(options: TrainOptions) -> optax.GradientTransformation:
    """The optimiser of the trunk; raises ValueError if a rate is out of range, or the user's file has none."""
    spec = options.optimizer.optimizer
    if spec is None:
        return make_optimizer(trunk_recipe(options))
    try:
        return user_optimizer(spec)
    except UserFileError as error:
        hint = "it is the trunk's: what experts learn with is --optimizer of dmoe node and dmoe up"
        raise UserFileError(f"{error} ({hint})") from error


def trunk_recipe(options: TrainOptions) -> Recipe:
    """The recipe that trains the trunk, unless the user gives an optimiser."""
    return replace(options.optimizer.recipe, total_steps=options.run_length.steps)


def trunk_config(options: TrainOptions, vocab_size: int) -> TransformerXLConfig:
    """Sizes and rates of the language model over this vocabulary; raises ValueError if they do not fit each other."""
    language = options.language
    sizes = {name: value for name, value in vars(language).items() if name not in ("router", "cutoffs")}
    cutoffs = language.cutoffs_below(vocab_size)
    return TransformerXLConfig(vocab_size=vocab_size, k_best=options.calls.k_best, cutoffs=cutoffs, **sizes)


async def own_training(options: TrainOptions, swarm: Swarm) -> Training:
    """The user's own model, from a file; raises UsageError if it is not what `--model` asks for."""
    data, spec = options.data, options.model or ""

    def make() -> tuple[AnyModel, list[Iterator[Any]]]:
        model = call_user(spec, user_model(spec), swarm, kind="model")
        if not isinstance(model, Model):
            raise UserFileError(f"model {spec!r}: expected a dmoe_jax.model.Model, got {type(model).__name__}")
        make_batches = getattr(model, "batches", None)
        if not callable(make_batches):
            raise UserFileError(
                f"model {spec!r}: {type(model).__name__} has no batches(shard, num_shards, seed), an iterator of "
                "training batches"
            )
        shards = range(data.num_trainers)
        return model, [iter(make_batches(shard, len(shards), data.chance_seed)) for shard in shards]

    with mistakes_in_one_line():
        model, batches = await trio.to_thread.run_sync(make, abandon_on_cancel=True)
    validation: Any = getattr(model, "validation", None)
    splits = ("valid",) if callable(validation) else ()
    return Training(
        model=model,
        task=Task(name=spec, unit=model.unit, splits=splits, meaning=model.meaning),
        batches=batches,
        evaluation=lambda split, max_items: (validation(), None),  # the user's data is read whole
        facts={"model": model.name, "trainers": data.num_trainers},
    )


async def check_before_joining(options: TrainOptions) -> None:
    """Look at the rates, and at the router, model and optimiser of the user's own, before the swarm hears of us.

    Raises UsageError naming the one that will not do.
    """

    def look() -> None:
        trunk_optimizer(options)
        if options.model is not None:
            user_model(options.model)
            return
        language = options.language
        router = make_router(language.router, language.grid_size)
        check_router(router, language.grid_size, language.layer.d_model, in_order=language.route == "token")

    with mistakes_in_one_line():
        # In a thread: a file of the user's may import anything.
        await trio.to_thread.run_sync(look, abandon_on_cancel=True)
