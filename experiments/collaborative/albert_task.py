"""A small ALBERT on WikiText-2: its samples by peer, its compiled gradient, and its loss on text that nobody trains on.

The vocabulary is cut to the most frequent words, so that the model is small beside its layers; all others are `<unk>`.
One compiled gradient serves every peer of a simulation.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int

from dmoe_jax.arrays import PyTree
from dmoe_jax.checks import check_positive
from dmoe_jax.data.corpora import Corpus, load_corpus
from dmoe_jax.data.vocabulary import UNK, Vocabulary
from dmoe_jax.optim.collaborative import collaborative
from experiments.collaborative.albert import AlbertConfig, albert_loss, init_albert
from experiments.collaborative.albert_recipe import AlbertRecipe, albert_optimizer
from experiments.collaborative.masked_text import MaskedBatch, MaskedText
from experiments.collaborative.world import Problem

_ONE_MACHINE_BATCH = 32
"""Samples of one compiled call of the machine that has the whole batch to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSize:
    """Sizes of the model, its text and its training."""

    num_words: int = 1000
    """Words of the vocabulary, the most frequent ones; the rest is `<unk>`."""
    seq_len: int = 32
    """Tokens of a sample."""
    d_model: int = 32
    """Width of the layer."""
    num_layers: int = 2
    """Number of times that the layer is applied."""
    target: int = 512
    """Samples of a global step."""
    held_out: int = 256
    """Samples of the validation text on which the loss is measured."""
    learning_rate: float = 0.1
    """Peak step size of LAMB."""
    warmup_steps: int = 2
    """Global steps until then."""
    total_steps: int = 32
    """Global steps after which the step size would be 0."""
    sent: int = 2**20
    """Numbers that peers average; those that the model has not are zeros. On lines that are made as much thinner as the
    vector is shorter than the paper's, the messages by which many peers find each other would else outweigh it."""

    def __post_init__(self) -> None:
        check_positive(num_words=self.num_words, target=self.target, held_out=self.held_out)


def frequent_words(corpus: Corpus, num_words: int) -> tuple[Vocabulary, Callable[..., Int[np.ndarray, " words"]]]:
    """The vocabulary of the most frequent words, and a function from the corpus's ids to its own.

    Raises:
      ValueError: there are fewer words, or `<unk>` is not among them.
    """
    words = corpus.vocabulary.words
    if not 1 <= num_words <= len(words) or UNK not in words[:num_words]:
        raise ValueError(f"num_words must be at most {len(words)}, with {UNK} among them, got {num_words}")
    unk = words.index(UNK)  # ids go by falling frequency

    def cut(ids: Int[np.ndarray, " words"]) -> Int[np.ndarray, " words"]:
        return np.where(ids < num_words, ids, unk).astype(np.int32)

    return Vocabulary(words[:num_words]), cut


class SampleNumbers:
    """Numbers of the text's samples that each peer reads.

    Machine k of n reads the numbers k, k + n, k + 2 n, ... A process that comes back goes on where the one before it on
    the same machine had stopped. A micro-batch that was asked for once keeps its numbers, so that a run can be repeated
    from what its peers wrote down.

    Args:
      num_machines: n. Peers are named "peerK.P": process P of machine K.
    """

    def __init__(self, num_machines: int) -> None:
        check_positive(num_machines=num_machines)
        self._num_machines = num_machines
        self._read = [0] * num_machines
        self._begins: dict[tuple[str, int], int] = {}

    def of(self, peer: str, number: int, count: int) -> range:
        """The numbers of micro-batch `number` of a peer, `count` of them.

        Raises:
          ValueError: the name is not one of those machines'.
        """
        index = peer.removeprefix("peer").partition(".")[0]
        if not (index.isdecimal() and int(index) < self._num_machines):
            raise ValueError(f"a peer is named peerK.P with K below {self._num_machines}, got {peer!r}")
        machine = int(index)
        if (peer, number) not in self._begins:
            self._begins[peer, number] = self._read[machine]
            self._read[machine] += count
        begin, stride = self._begins[peer, number], self._num_machines
        return range(machine + begin * stride, machine + (begin + count) * stride, stride)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AlbertTask:
    """Model, text and optimiser of a training. Made by `albert_task`."""

    size: TaskSize
    config: AlbertConfig
    text: MaskedText
    held_out: MaskedBatch
    params: PyTree
    """To begin with: the model's, and zeros that stay so, see `TaskSize.sent`."""
    optimizer: optax.GradientTransformation
    """LAMB under a clipped gradient."""

    @property
    def num_params(self) -> int:
        """Numbers in the parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def loss(self, params: PyTree) -> float:
        """On the held-out samples: masked words plus sentence order, nats."""
        return float(_loss(self.config)(params["model"], self.held_out))

    def gradient(self, params: PyTree, numbers: Sequence[int]) -> PyTree:
        """Mean gradient of the samples of these numbers, in one compiled call."""
        grads = _gradient(self.config)(params["model"], self.text.batch(numbers))
        return {"model": grads, "zeros": self.params["zeros"]}

    def batch_gradient(self, params: PyTree, numbers: Sequence[int]) -> PyTree:
        """Mean gradient of many samples, in several calls of which the last ones are smaller."""
        total = None
        begin = 0
        while begin < len(numbers):
            # Powers of two: a batch of any size takes a few compiled ones.
            size = min(_ONE_MACHINE_BATCH, 2 ** ((len(numbers) - begin).bit_length() - 1))
            part = numbers[begin : begin + size]
            begin += size
            weight = len(part) / len(numbers)
            grads = jax.tree.map(lambda leaf, weight=weight: weight * leaf, self.gradient(params, part))
            total = grads if total is None else jax.tree.map(operator.add, total, grads)
        return total

    def problem(self, num_machines: int) -> Problem:
        """The same for a world of so many machines."""
        numbers = SampleNumbers(num_machines)

        def gradient(params: PyTree, peer: str, number: int, count: int) -> PyTree:
            return self.gradient(params, numbers.of(peer, number, count))

        def batch_gradient(params: PyTree, micro_batches: Sequence[tuple[str, int, int]]) -> PyTree:
            return self.batch_gradient(params, [each for one in micro_batches for each in numbers.of(*one)])

        return Problem(
            params=self.params,
            gradient=gradient,
            batch_gradient=batch_gradient,
            together=collaborative(self.optimizer),
            optimizer=self.optimizer,
        )

    def one_machine(self) -> Iterator[PyTree]:
        """Parameters after each step of one machine that reads all samples in order, `size.target` a step; endless."""
        params, state, step = self.params, self.optimizer.init(self.params), _step(self.optimizer)
        batch = range(self.size.target)
        while True:
            params, state = step(params, state, self.batch_gradient(params, batch))
            yield params
            batch = range(batch.stop, batch.stop + self.size.target)


def albert_task(size: TaskSize = TaskSize(), *, seed: int = 0, corpus: Corpus | None = None) -> AlbertTask:
    """The task.

    Args:
      size: of everything. seed: of the parameters, and of the order and the masks of the training text; the held-out
        samples are the same for all seeds.
      corpus: None: WikiText-2, or the embedded text where that cannot be had.

    Raises:
      ValueError: the text is too short, or has too few words. DataError: it cannot be had.
    """
    corpus = load_corpus() if corpus is None else corpus
    vocabulary, cut = frequent_words(corpus, size.num_words)
    text = MaskedText(cut(corpus.train), vocabulary, seq_len=size.seq_len, seed=seed)
    held_out = MaskedText(cut(corpus.valid), vocabulary, seq_len=size.seq_len, seed=0)
    config = AlbertConfig(
        vocab_size=text.vocab_size,
        d_model=size.d_model,
        d_ff=4 * size.d_model,
        num_layers=size.num_layers,
        max_len=size.seq_len,
    )
    recipe = AlbertRecipe(
        learning_rate=size.learning_rate,
        warmup_steps=size.warmup_steps,
        total_steps=size.total_steps,
        grad_clip=1.0,
    )
    model = init_albert(jax.random.key(seed), config)
    num_zeros = max(0, size.sent - sum(leaf.size for leaf in jax.tree.leaves(model)))
    return AlbertTask(
        size=size,
        config=config,
        text=text,
        held_out=held_out.batch(range(min(size.held_out, held_out.num_chunks))),
        params={"model": model, "zeros": jnp.zeros(num_zeros)},
        optimizer=albert_optimizer(recipe),
    )


@functools.cache
def _loss(config: AlbertConfig) -> Callable[[PyTree, MaskedBatch], jax.Array]:
    return jax.jit(lambda params, batch: albert_loss(params, config, batch)[0])


@functools.cache
def _gradient(config: AlbertConfig) -> Callable[[PyTree, MaskedBatch], PyTree]:
    """Once for all peers and seeds of a process; compiled once for each size of a micro-batch."""
    return jax.jit(jax.grad(lambda params, batch: albert_loss(params, config, batch)[0]))


@functools.cache
def _step(optimizer: optax.GradientTransformation) -> Callable[..., tuple[PyTree, PyTree]]:
    def step(params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)
