"""A trained language model in one object: what it expects, how well it reads, and what it writes.

`AsyncTrainedModel` has it all as coroutines; `TrainedModel` is the same for ordinary code. Their experts are those that
were saved, or those of a living swarm.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from dmoe_jax.arrays import PyTree
from dmoe_jax.autodiff import without_waiting
from dmoe_jax.data.pieces import AnyVocabulary
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import empty_memory
from dmoe_jax.routing.base import Router
from dmoe_jax.trained.decoding import Alive, Decoder, Tokens
from dmoe_jax.trained.evaluation import ROWS, TextEvaluation, evaluate_text
from dmoe_jax.trained.readers import LocalReader, Reader, SwarmReader, ThreadReader, pure_log_probs
from dmoe_jax.trained.sampling import Draw, row_keys, sample
from dmoe_jax.trained.saved_model import MOST_LENGTH, SavedModel
from dmoe_jax.trained.settings import Sampling

T = TypeVar("T")

MOST_AT_ONCE = 64
"""Most prompts that are read side by side; further ones follow."""

OnPiece = Callable[[int, str], Any]
"""Told of each piece of text as it is written: (number of the prompt, the piece); True ends this prompt's text."""

Text = str | Sequence[int] | Int[np.ndarray, " tokens"]
"""A text, or the ids of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Continuation of a prompt.

    Attributes:
      text: what was written, without the prompt.
      ids: its tokens.
      log_probs: log-probability of each token under the model, nats.
    """

    text: str
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]


class LanguageModel(NamedTuple):
    """A model without its parameters: its sizes, and the router that chooses its experts."""

    config: TransformerXLConfig
    router: Router

    def log_probs(
        self,
        params: PyTree,
        experts: Sequence[PyTree],
        tokens: Tokens,
        alive: Alive | None = None,
    ) -> Float[Array, "B T vocab"]:
        """Log-probability of every token after each of `tokens`, nats: pure, for `jit` and `grad`.

        Args:
          params, experts: as of a `TrainedModel`.
          alive: experts that may be chosen; None: all may.
        """
        return pure_log_probs(self.config, self.router, params, experts, tokens, alive)


@dataclass(frozen=True, kw_only=True)
class AsyncTrainedModel:
    """A trained model whose methods are coroutines. Made by `TrainedModel.on` and `TrainedModel.under_trio`."""

    saved: SavedModel
    """Its parameters."""
    vocabulary: AnyVocabulary
    """Text <-> ids."""
    split: Callable[[str], Int[np.ndarray, " tokens"]]
    """Tokens of a part of the text that it was trained on: of "train", "valid" or "test"."""
    reader: Reader
    """Its way to read, with its parameters and experts."""

    async def log_probs(self, text: Text) -> Float[np.ndarray, "tokens vocab"]:
        """See `TrainedModel.log_probs`."""
        ids = self.encode(text)
        reader, decoder = self.reader, self.reader.decoder
        tokens, lengths = _in_segments([ids], decoder.config.seq_len)
        read = await reader.read_segments(empty_memory(decoder.config, 1), tokens, lengths)
        every = await reader.run(decoder.log_probs, reader.trunk, read.hidden[:, : len(ids)])
        return np.asarray(every[0])

    async def evaluate(
        self, text: Text, *, rows: int = ROWS, on_batch: Callable[[int, int], None] = lambda done, batches: None
    ) -> TextEvaluation:
        """See `TrainedModel.evaluate`."""
        return await evaluate_text(self.reader, self.encode(text), rows=rows, on_batch=on_batch)

    async def generate(
        self,
        prompts: Sequence[Text],
        *,
        words: int = 100,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        on_piece: OnPiece = lambda prompt, piece: False,
    ) -> list[Generated]:
        """See `TrainedModel.generate`."""
        if words < 1:
            raise ValueError(f"words must be at least 1, got {words}")
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        done: list[Generated] = []
        for first in range(0, len(prompts), MOST_AT_ONCE):
            texts = [_Writing(self, text) for text in prompts[first : first + MOST_AT_ONCE]]
            await self._continue(first, texts, words, sampling, on_piece)
            done += [text.done() for text in texts]
        return done

    async def _continue(
        self, first: int, texts: "list[_Writing]", words: int, sampling: Sampling, on_piece: OnPiece
    ) -> None:
        reader, decoder, count = self.reader, self.reader.decoder, len(texts)
        keys, draw = row_keys(sampling.seed, range(first, first + count)), Draw.of(sampling)
        tokens, lengths = _in_segments([text.prompt for text in texts], decoder.config.seq_len)
        read = await reader.read_segments(empty_memory(decoder.config, count), tokens, lengths)
        state, hidden = await reader.run(decoder.state_after, read, tokens, lengths)
        for step in range(words):
            drawn, likely = await reader.run(_drawn, decoder, draw, reader.trunk, hidden, keys, np.int32(step))
            for number, (text, token, log_prob) in enumerate(zip(texts, drawn.tolist(), likely.tolist(), strict=True)):
                if not text.is_over and (piece := text.add(token, log_prob)):
                    text.is_over = on_piece(first + number, piece) is True
            if step == words - 1 or all(text.is_over for text in texts):
                break
            hidden, state = await reader.read_word(state, drawn)

    def encode(self, text: Text) -> Int[np.ndarray, " tokens"]:
        """Ids of a text, of an empty one that which ends a line. Raises ValueError for an id of another vocabulary."""
        ids = self.vocabulary.encode_text(text) if isinstance(text, str) else np.asarray(text, np.int64)
        if not ids.size:
            return np.asarray(self.vocabulary.encode_text("\n"), np.int32)
        if ids.ndim != 1 or ids.min() < 0 or ids.max() >= len(self.vocabulary):
            raise ValueError(f"tokens are ids from 0 to {len(self.vocabulary) - 1} in a row, got {text!r:.80}")
        return ids.astype(np.int32)


@partial(jax.jit, static_argnums=0)
def _drawn(decoder: Decoder, draw: Draw, trunk: PyTree, hidden: Any, keys: Any, step: Any) -> Any:
    """The next word of each sequence and its log-probability: see `sample`."""
    return sample(draw, decoder.log_probs(trunk, decoder.last(hidden)), keys, step)


_OVERLAP = 8
"""Tokens that are decoded again with each new one: how a token reads depends on those right before it."""


class _Writing:
    """A prompt that is being continued."""

    def __init__(self, model: AsyncTrainedModel, prompt: Text) -> None:
        self.prompt = model.encode(prompt)
        self.is_over = False
        self._decode = model.vocabulary.decode
        self._tail = self.prompt[-_OVERLAP:].tolist()
        self._ids: list[int] = []
        self._log_probs: list[float] = []
        self._pieces: list[str] = []
        self._open = 0  # tokens at the end of the tail whose text is not complete

    def add(self, token: int, log_prob: float) -> str:
        """Add a token; return the text that it completes, which may be empty."""
        self._ids.append(token)
        self._log_probs.append(log_prob)
        before = self._tail[: len(self._tail) - self._open]
        self._tail, self._open = [*self._tail, token], self._open + 1
        text = self._decode(self._tail)
        # The first bytes of a character whose others are still to come, unless that takes too long.
        if text.endswith("\ufffd") and self._open < _OVERLAP:
            return ""
        piece = text[len(self._decode(before)) :]
        self._tail, self._open = self._tail[-_OVERLAP:], 0
        self._pieces.append(piece)
        return piece

    def done(self) -> Generated:
        """Return the continuation."""
        rest = self._decode(self._tail)[len(self._decode(self._tail[: len(self._tail) - self._open])) :]
        text = "".join([*self._pieces, rest if self._open else ""])
        return Generated(text=text, ids=tuple(self._ids), log_probs=tuple(self._log_probs))


def _in_segments(texts: Sequence[np.ndarray], seq_len: int) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Tokens in whole segments, zeros behind the end of each text, and the lengths. The number of segments is a power
    of two, so that few programs are compiled."""
    lengths = np.array([text.size for text in texts], np.int32)
    count = 1 << (-(-int(lengths.max()) // seq_len) - 1).bit_length()
    tokens = np.zeros((len(texts), count * seq_len), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: text.size] = text
    return tokens, lengths


class TrainedModel:
    """A trained model. Made by `load_run`, with the experts that were saved; see `on` for those of a swarm.

    Args:
      wait: carries out what an `AsyncTrainedModel` does, and waits for it.
      name: the place that it came from, for people.
    """

    def __init__(
        self,
        saved: SavedModel,
        vocabulary: AnyVocabulary,
        split: Callable[[str], Int[np.ndarray, " tokens"]],
        reader: Reader | None = None,
        wait: Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any] = lambda start: without_waiting(start()),
        *,
        name: str = "",
    ) -> None:
        self._saved, self._reader, self._wait, self._name = saved, reader, wait, name
        self._local: LocalReader | None = None
        self.model = LanguageModel(saved.config, saved.router)
        """The model without parameters."""
        self.params: PyTree = saved.trunk
        """Parameters of everything but the experts."""
        self.experts: tuple[PyTree, ...] = saved.experts
        """Parameters of each layer's experts as they were saved, stacked; zeros for those that were not."""
        self.known: np.ndarray = saved.known
        """Bool [layers, *grid], true for each expert that was saved."""
        self.vocabulary = vocabulary
        """Text <-> ids."""
        self.split = split
        """Tokens of a part, "train", "valid" or "test", of the text that it was trained on. Raises ValueError if that
        cannot be had."""
        self.step: int = saved.step
        """Number of trunk updates that the model has taken."""

    def __repr__(self) -> str:
        config, known = self.model.config, self.known
        experts = f"{known.sum()} of {known.size} experts" if self._reader is None else "experts of a swarm"
        sizes = f"num_layers {config.num_layers}, d_model {config.d_model}, router {self.model.router.name}"
        return f"<TrainedModel {self._name or 'of no name'}: Transformer-XL, {sizes}, step {self.step}, {experts}>"

    def log_probs(self, text: Text) -> Float[np.ndarray, "tokens vocab"]:
        """Log-probability of every token after each one of a text, nats. It begins without a memory.

        Raises:
          ValueError: the text has no token, or a token that the model does not know. NetError: as `generate`.
        """
        return self._do(lambda model: model.log_probs(text))

    def evaluate(
        self, text: Text, *, rows: int = ROWS, on_batch: Callable[[int, int], None] = lambda done, batches: None
    ) -> TextEvaluation:
        """Perplexity of a text: see `evaluate_text`."""
        return self._do(lambda model: model.evaluate(text, rows=rows, on_batch=on_batch))

    def generate(
        self,
        prompts: Sequence[Text],
        *,
        words: int = 100,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        on_piece: OnPiece = lambda prompt, piece: False,
    ) -> list[Generated]:
        """Continue each prompt. An empty one begins a text.

        Args:
          words: most tokens of each continuation.
          temperature: divides the log-probabilities; 0 takes the likeliest token each time.
          top_k: number of the likeliest tokens that may be drawn; 0: all.
          top_p: probability that the likeliest tokens which may be drawn must reach together; 1: all of them.
          seed: seed of the draw. A prompt's text follows from it and from the prompt's place among the prompts.
          on_piece: told of each piece of text as it is written, (number of the prompt, the piece); True ends this
            prompt's text.

        Raises:
          ValueError: a setting is out of range, or a prompt has a token that the model does not know.
          NoQuorum: no expert of a layer answers, for as long as patience lasts; another NetError: the swarm is gone.
        """
        settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        return self._do(lambda model: model.generate(prompts, words=words, on_piece=on_piece, **settings))

    def with_lengths(self, *, mem_len: int | None = None, clamp_len: int | None = None) -> "TrainedModel":
        """The model with a longer or shorter memory, or another clamp, than in training; None: as it was.

        Raises:
          ValueError: a length is not positive or above `MOST_LENGTH`, or the experts are a swarm's, which have lengths
            of their own.
        """
        given = {"mem_len": mem_len, "clamp_len": clamp_len}
        changes = {name: value for name, value in given.items() if value is not None}
        if beyond := [f"{name} {value}" for name, value in changes.items() if value > MOST_LENGTH]:
            raise ValueError(f"lengths are at most {MOST_LENGTH:,}, got {', '.join(beyond)}")
        if changes and isinstance(self._reader, SwarmReader):
            raise ValueError(f"experts of a swarm keep the lengths of training, got {changes}")
        saved = replace(self._saved, config=self._saved.config.replace(**changes))
        return TrainedModel(saved, self.vocabulary, self.split, name=self._name)

    def on(self, swarm: Any, *, timeout_s: float = 10.0, patience_s: float = 60.0) -> Any:
        """The model with the experts of a living swarm, which answer and do not learn from it.

        Args:
          swarm: a `Swarm`, for an `AsyncTrainedModel`; or a `BlockingSwarm`, for a `TrainedModel`.
          timeout_s: seconds after which a call is given up, and made again.
          patience_s: seconds for which an expert is asked before others take its place.
        """
        saved, inner = self._saved, getattr(swarm, "swarm", swarm)
        reader = SwarmReader(saved.config, saved.router, saved.trunk, inner, timeout_s=timeout_s, patience_s=patience_s)
        if inner is swarm:
            return self._with(reader)
        return TrainedModel(saved, self.vocabulary, self.split, reader, swarm.run, name=self._name)

    def under_trio(self) -> AsyncTrainedModel:
        """The model for code under trio, with the experts that were saved; it computes in a worker thread.

        Raises:
          ValueError: no expert of some layer was saved.
        """
        return self._with(ThreadReader(self._local_reader()))

    def _with(self, reader: Reader) -> AsyncTrainedModel:
        return AsyncTrainedModel(saved=self._saved, vocabulary=self.vocabulary, split=self.split, reader=reader)

    def _do(self, work: Callable[[AsyncTrainedModel], Coroutine[Any, Any, T]]) -> T:
        model = self._with(self._reader or self._local_reader())
        result: T = self._wait(lambda: work(model))
        return result

    def _local_reader(self) -> LocalReader:
        """The reader of the experts that were saved; those that were not are never chosen."""
        if self._local is None:
            saved = self._saved
            lost = [layer for layer, known in zip(saved.layers, saved.known, strict=True) if not known.any()]
            if lost:
                raise ValueError(
                    f"no expert of {', '.join(lost)} was saved with the run: name the folders in which nodes saved "
                    "them, or join a swarm that serves them"
                )
            alive = None if saved.known.all() else saved.known
            self._local = LocalReader(saved.config, saved.router, saved.trunk, saved.experts, alive)
        return self._local
