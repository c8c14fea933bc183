"""A small ALBERT on WikiText-2: its samples by peer, its compiled gradient, and its loss on text that nobody trains on.

The vocabulary is cut to the most frequent words, so that the model is small beside its layers; all others are `<unk>`.
The optimiser is that of ALBERT (Lan et al. 2020, section 4.1), DeDLOC and Moshpit SGD: LAMB (You et al. 2020, algorithm
2) under a clipped gradient, with linear warm-up and linear decay.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int

from dmoe_jax.arrays import PyTree
from dmoe_jax.data import Corpus, load_corpus
from dmoe_jax.data.vocabulary import UNK
from dmoe_jax.optim import collaborative
from experiments.collaborative.albert import AlbertConfig, albert_loss, init_albert
from experiments.collaborative.masked_text import NUM_SPECIAL, MaskedBatch, MaskedText
from experiments.collaborative.world import Problem

_PEAK, _WARMUP_STEPS, _TOTAL_STEPS = 0.1, 2, 32
"""Step size of LAMB after the warm-up, and global steps until then and until it would be 0."""


def decays(params: PyTree) -> PyTree:
    """Return a tree of bool, True for the arrays that decay: not `bias`, nor `scale`, a LayerNorm's gain."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: getattr(path[-1], "key", None) not in ("bias", "scale"), params
    )


@functools.cache
def albert_optimizer() -> optax.GradientTransformation:
    """Return the optimiser, the same object for all: they share compiled code."""
    warmup = optax.linear_schedule(0.0, _PEAK, _WARMUP_STEPS)
    decay = optax.linear_schedule(_PEAK, 0.0, _TOTAL_STEPS - _WARMUP_STEPS)
    schedule = optax.join_schedules([warmup, decay], [_WARMUP_STEPS])
    lamb = optax.lamb(schedule, b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.01, mask=decays)
    return optax.chain(optax.clip_by_global_norm(1.0), lamb)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AlbertTask:
    """Model, text and batch of a training. Made by `albert_task`."""

    config: AlbertConfig
    text: MaskedText
    held_out: MaskedBatch
    params: PyTree
    """To begin with: {"model", "zeros"}, see `albert_task`."""
    target: int
    """Samples of a global step."""

    @property
    def num_params(self) -> int:
        """Numbers in the parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def loss(self, params: PyTree) -> float:
        """Return the loss on the held-out samples: masked words plus segment order, nats."""
        return float(_loss(params["model"], self.config, self.held_out))

    def gradient(self, params: PyTree, numbers: Sequence[int]) -> PyTree:
        """Return the mean gradient of the samples of these numbers; it is compiled for each number of samples."""
        grads = _gradient(params["model"], self.config, self.text.batch(numbers))
        return {"model": grads, "zeros": self.params["zeros"]}

    def problem(self, num_machines: int) -> Problem:
        """Return the same for a world of so many machines, whose names are "peer0", "peer1" and so on.

        Machine k of n reads the samples k, k + n, k + 2 n, ... A process that comes back goes on where the one before
        it on the same machine had stopped. A micro-batch keeps its numbers, so that a run can be repeated.
        """
        begins: dict[tuple[str, int], int] = {}
        read = [0] * num_machines

        def numbers_of(peer: str, number: int, count: int) -> range:
            machine = int(peer.removeprefix("peer").partition(".")[0])
            if (peer, number) not in begins:
                begins[peer, number] = machine + read[machine] * num_machines
                read[machine] += count
            begin = begins[peer, number]
            return range(begin, begin + count * num_machines, num_machines)

        def gradient(params: PyTree, peer: str, number: int, count: int) -> PyTree:
            return self.gradient(params, numbers_of(peer, number, count))

        def batch_gradient(params: PyTree, micro_batches: Sequence[tuple[str, int, int]]) -> PyTree:
            return self.gradient(params, [each for one in micro_batches for each in numbers_of(*one)])

        return Problem(
            params=self.params,
            gradient=gradient,
            batch_gradient=batch_gradient,
            together=collaborative(albert_optimizer()),
            optimizer=albert_optimizer(),
        )

    def one_machine(self) -> Iterator[PyTree]:
        """Yield the parameters after each step of one machine that reads all samples in order; endless."""
        params, state = self.params, albert_optimizer().init(self.params)
        batch = range(self.target)
        while True:
            params, state = _step(params, state, self.gradient(params, batch))
            yield params
            batch = range(batch.stop, batch.stop + self.target)


def albert_task(
    *,
    config: AlbertConfig = AlbertConfig(),  # noqa: B008 (frozen)
    target: int = 512,
    held_out: int = 256,
    sent: int = 2**20,
    seed: int = 0,
    corpus: Corpus | None = None,
) -> AlbertTask:
    """Make the task.

    Args:
      config: the model.
      target: samples of a global step.
      held_out: samples of the validation text on which the loss is measured.
      sent: numbers that peers average; those that the model has not are zeros. On lines that are made as much thinner
        as the vector is shorter than the paper's, the messages by which many peers find each other would else outweigh
        it.
      seed: of the parameters, and of the order and the masks of the training text; the held-out samples are the same
        for all seeds.
      corpus: None: WikiText-2, or the embedded text where that cannot be had.

    Raises:
      ValueError: the text is too short. DataError: it cannot be had.
    """
    corpus = load_corpus() if corpus is None else corpus
    words = corpus.vocabulary.words[: config.vocab_size - NUM_SPECIAL]

    def samples(ids: Int[np.ndarray, " words"], seed: int) -> MaskedText:
        frequent = np.where(ids < len(words), ids, words.index(UNK)).astype(np.int32)  # ids go by falling frequency
        return MaskedText(frequent, vocab_size=config.vocab_size, seq_len=config.max_len, seed=seed)

    model = init_albert(jax.random.key(seed), config)
    num_zeros = max(0, sent - sum(leaf.size for leaf in jax.tree.leaves(model)))
    return AlbertTask(
        config=config,
        text=samples(corpus.train, seed),
        held_out=samples(corpus.valid, 0).batch(range(held_out)),
        params={"model": model, "zeros": jnp.zeros(num_zeros)},
        target=target,
    )


# Once for all peers and seeds of a process.
_loss = jax.jit(albert_loss, static_argnums=1)
_gradient = jax.jit(jax.grad(albert_loss), static_argnums=1)


@jax.jit
def _step(params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
    updates, state = albert_optimizer().update(grads, state, params)
    return optax.apply_updates(params, updates), state
