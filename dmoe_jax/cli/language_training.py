"""The language model of `dmoe train`: the Transformer-XL that its flags describe, and its text."""

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import trio

from dmoe_jax.cli.train_options import TrainOptions
from dmoe_jax.cli.trained_models import Training
from dmoe_jax.data.batches import SegmentStream, evaluation_segments
from dmoe_jax.data.corpora import load_corpus
from dmoe_jax.directory.grid import layer_prefix
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.transformer_xl import TransformerXL
from dmoe_jax.routing.registry import make_router
from dmoe_jax.runs.endings import mistakes_in_one_line
from dmoe_jax.swarm.swarm import Swarm
from dmoe_jax.training.progress import TrainingProgress
from dmoe_jax.training.task import language_task

_EVAL_BATCH = 16
"""Rows of an evaluation batch, each from another place of the text: enough places for a part to stand for the whole."""


async def language_training(options: TrainOptions, swarm: Swarm, progress: TrainingProgress) -> Training:
    """The Transformer-XL of the flags; raises UsageError for a router, a corpus or sizes that will not do."""
    data, language = options.data, options.language
    with progress.phase("loading the corpus"), mistakes_in_one_line():
        corpus = await trio.to_thread.run_sync(
            lambda: load_corpus(source=data.data, tokenizer=data.tokenizer), abandon_on_cancel=True
        )
    progress.say(f"corpus: {corpus.description}")
    if options.calls.k_best >= (count := math.prod(language.grid_size)):
        progress.say(
            f"--k-best {options.calls.k_best} of {count} experts: all get every sample, the router only weighs"
        )
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


def trunk_config(options: TrainOptions, vocab_size: int) -> TransformerXLConfig:
    """Sizes and rates of the language model over this vocabulary; raises ValueError if they do not fit each other."""
    language = options.language
    sizes = {name: value for name, value in vars(language).items() if name not in ("router", "cutoffs")}
    cutoffs = language.cutoffs_below(vocab_size)
    return TransformerXLConfig(vocab_size=vocab_size, k_best=options.calls.k_best, cutoffs=cutoffs, **sizes)
