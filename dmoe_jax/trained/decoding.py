"""A Transformer-XL reads on, word by word: its memory is the cache.

The model was trained on segments of `seq_len` words, each with a memory of what entered its layers before. So it reads
here: a word sees its own segment and the `mem_len` states before that, and where sequences are routed a segment keeps
the experts that its first word and the memory chose. A word that is read alone gives what it gives inside its segment,
to rounding. So a prompt is read in one pass (`Decoder.read_segments`), and what follows word by word (`read_word`).

Both are coroutines that do not know where experts live: a layer's `Mix` asks them, `Run` carries out what is between.
Where experts are at hand neither waits, and the whole is traced into one program; else each function is a program.

Axes: B sequences, S words of a segment, T = N S words of N segments, M slots of memory, L = M + S - 1 states kept.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dmoe_jax.arrays import PyTree
from dmoe_jax.machine.remembered import remembered
from dmoe_jax.mixture.remote import mix_segment
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.transformer_xl import attention_segment, expert_inputs, router_ids, routing_features, segments
from dmoe_jax.models.trunk import LayerMemory, Memory, next_memory, token_nll, word_log_probs
from dmoe_jax.routing.base import Router, Scores, score


class Kept(NamedTuple):
    """A layer's memory of the words read so far.

    Attributes:
      states: [B, L, d_model], hidden states that entered the layer, newest last.
      features: [B, d_model], what routes the segment at hand; [B, 0] where each word is routed by itself.
    """

    states: Float[Array, "B L d_model"]
    features: Float[Array, "B _"]


class ReadSoFar(NamedTuple):
    """A batch of sequences, each read as far as it goes.

    Attributes:
      layers: one `Kept` for each layer.
      filled: int32 [B], number of states that are kept, of the newest.
      place: int32 [B], number of words read of the segment at hand, 0 to S - 1.
      first: int32 [B], first word of that segment, for routers that hash.
    """

    layers: tuple[Kept, ...]
    filled: Int[Array, " B"]
    place: Int[Array, " B"]
    first: Int[Array, " B"]


class SegmentsRead(NamedTuple):
    """Whole segments that were read.

    Attributes:
      hidden: [B, T, d_model], output of the last layer.
      entered: for each layer the states that entered it, [B, T, d_model].
      features: for each layer what its segments are routed by, [B, N, d_model]; [B, N, 0] where words are routed.
    """

    hidden: Float[Array, "B T d_model"]
    entered: tuple[Float[Array, "B T d_model"], ...]
    features: tuple[Float[Array, "B N _"], ...]


class Asked(NamedTuple):
    """Input of a mixture.

    Attributes:
      scores: the router's, of each sample.
      inputs: the experts' inputs, [samples, ...].
      wanted: bool [samples], False for padding, whose output is of no meaning; None: all are wanted.
      at: int32 [samples], the one position of an expert's output that is wanted; None: all are.
      chosen: (indices [samples, slots, dims], mask [samples, slots]) of the experts, where it is known who may be
        chosen; else None.
    """

    scores: Scores
    inputs: tuple[Any, ...]
    wanted: Bool[Array, " samples"] | None = None
    at: Int[Array, " samples"] | None = None
    chosen: tuple[Any, Any] | None = None


class Unmixed(NamedTuple):
    """Outputs of experts, which the next program mixes: arguments of `mixture.remote.mix_segment`."""

    scores: Scores
    indices: Any
    mask: Any
    outputs: Any
    x: Any


Tokens = Int[Array, "B T"] | Int[np.ndarray, "B T"]
"""Sequences of tokens."""
Each = Int[Array, " B"] | Int[np.ndarray, " B"]
"""A number of each sequence."""
Alive = Bool[Array, "layers *grid"] | Bool[np.ndarray, "layers *grid"]
"""True for each expert that may be chosen."""


@runtime_checkable
class Mix(Protocol):
    """The mixture of a layer, wherever its experts live."""

    async def alive(self) -> Any:
        """Return bool [*grid], true for experts that may be chosen; None if they are not chosen from a whole grid."""
        ...

    async def __call__(self, asked: Asked) -> Array | Unmixed:
        """Return its outputs: [samples, ...]; with `at`, [samples, 1, d_model]."""
        ...


Run = Callable[..., Awaitable[Any]]
"""Carries out a jitted function: (function, *args) -> its result."""


@remembered(8)
def make_decoder(config: TransformerXLConfig, router: Router, whole_segments: bool = False) -> "Decoder":
    """The decoder of these arguments, made once, with all that it compiled."""
    return Decoder(config, router, whole_segments)


class Decoder:
    """Functions of one model that read a text; jitted, and without parameters.

    Args:
      whole_segments: True if experts take whole segments alone, as those of nodes do: then a word is sent with the
        words before it in its segment. Else it is given to them by itself, and all that it sees as its memory.
    """

    def __init__(self, config: TransformerXLConfig, router: Router, whole_segments: bool) -> None:
        self.config, self.router, self.whole_segments = config, router, whole_segments
        self.states_kept = config.mem_len + config.seq_len - 1
        self._embed = jax.jit(segments(config, router).embed)
        self._segments_asked = jax.jit(self._ask_for_segments)
        self._finished = jax.jit(lambda hidden, tokens: self._mixed(hidden).reshape(*tokens.shape, -1))
        self._first_asked = jax.jit(self._ask_for_first)
        self._word_asked = jax.jit(self._ask_for_word)
        self.log_probs = jax.jit(lambda trunk, hidden: word_log_probs(trunk["embed"], trunk["head"], hidden, config))
        """(trunk, hidden [..., d_model]) -> log-probability of each word [..., vocab], nats."""
        self.nll = jax.jit(
            lambda trunk, hidden, targets: token_nll(trunk["embed"], trunk["head"], hidden, targets, config)
        )
        """(trunk, hidden [B, T, d_model], targets [B, T]) -> negative log-probability of each target, nats."""
        self.memory_after = jax.jit(lambda memory, entered: tuple(map(next_memory, memory, entered)))
        """(memory, entered) -> memory of the segments that follow."""
        self.state_after = jax.jit(self._kept_states)
        """(read from an empty memory, tokens [B, T], lengths [B]) -> (`ReadSoFar`, the output of the last layer
        for the last word of each sequence, [B, 1, d_model])."""

    async def read_segments(
        self, run: Run, mixes: Sequence[Mix], trunk: PyTree, memory: Memory, tokens: Tokens, lengths: Each
    ) -> SegmentsRead:
        """Read segments side by side, all of them with one call of each layer's experts.

        Args:
          memory: what was read before. tokens: T is a multiple of S; anything stands behind a sequence's end.
          lengths: number of words of each sequence.
        """
        hidden, entered, features = await run(self._embed, trunk["embed"], tokens), [], []
        for layer, (mix, before) in enumerate(zip(mixes, memory, strict=True)):
            text = (tokens, lengths, await mix.alive())
            asked, states, own = await run(self._segments_asked, _layer_params(trunk, layer), hidden, before, *text)
            entered.append(states)
            features.append(own)
            hidden = await mix(asked)
        return SegmentsRead(await run(self._finished, hidden, tokens), tuple(entered), tuple(features))

    async def read_word(
        self, run: Run, mixes: Sequence[Mix], trunk: PyTree, state: ReadSoFar, tokens: Each
    ) -> tuple[Array | Unmixed, ReadSoFar]:
        """Read one word of each sequence; return the last layer's output, for `last`, and what was read with it."""
        params, alive = _layer_params(trunk, 0), await mixes[0].alive()
        asked, kept, state, behind = await run(self._first_asked, trunk["embed"], params, state, tokens, alive)
        layers, hidden = [kept], await mixes[0](asked)
        for layer, before in enumerate(state.layers[1:], start=1):
            word = (state, before, tokens, await mixes[layer].alive())
            asked, kept = await run(self._word_asked, _layer_params(trunk, layer), hidden, *word)
            layers.append(kept)
            hidden = await mixes[layer](asked)
        filled, place = behind
        return hidden, ReadSoFar(tuple(layers), filled, place, state.first)

    def last(self, hidden: Array | Unmixed) -> Float[Array, "B d_model"]:
        """The output of the last layer for one word of each sequence; traced."""
        mixed = self._mixed(hidden)
        return mixed.reshape(len(mixed), -1)

    def _mixed(self, hidden: Any) -> Array:
        return mix_segment(self.router)(*hidden)[0] if isinstance(hidden, Unmixed) else hidden

    def _asked(self, alive: Any, scores: Scores, inputs: Any, **more: Any) -> Asked:
        chosen = None if alive is None else self.router.select(scores, self.config.k_best, alive)
        return Asked(scores, inputs, chosen=chosen, **more)

    def _ask_for_segments(
        self, params: tuple[PyTree, PyTree], hidden: Any, before: LayerMemory, tokens: Array, lengths: Array, alive: Any
    ) -> tuple[Asked, Array, Array]:
        """(what the layer's experts are asked, the states that entered it, what its segments are routed by)."""
        config, entered = self.config, self._mixed(hidden).reshape(*tokens.shape, -1)
        batch, total, width = entered.shape
        count, size = total // config.seq_len, config.seq_len
        slots = np.arange(count)[:, None] * size + np.arange(config.mem_len)
        states = jnp.concatenate([before.states, entered], axis=1)[:, slots]
        filled = jnp.concatenate([before.mask, jnp.ones((batch, total), bool)], axis=1)[:, slots]
        memory = LayerMemory(states.reshape(-1, *states.shape[2:]), filled.reshape(-1, config.mem_len))
        if config.routes_tokens:
            features = own = attention_segment(config)(params[1], entered.reshape(-1, width), memory)
            kept, begins = jnp.zeros((batch, count, 0)), jnp.arange(total)
        else:
            own = entered.reshape(-1, size, width)
            features = routing_features(own, memory.states, memory.mask)
            kept, begins = features.reshape(batch, count, width), jnp.arange(count) * size
        ids = jnp.asarray(router_ids(config, tokens.reshape(-1, size)))
        scores, inputs = score(self.router, params[0], features, ids=ids), expert_inputs(config, own, memory)
        return self._asked(alive, scores, inputs, wanted=(begins < lengths[:, None]).reshape(-1)), entered, kept

    def _ask_for_first(
        self, embed: PyTree, params: tuple[PyTree, PyTree], state: ReadSoFar, tokens: Array, alive: Any
    ) -> tuple[Asked, Kept, ReadSoFar, tuple[Array, Array]]:
        """(as of `_ask_for_word` for the first layer, the state with its segment's first word, `filled` and `place`
        behind the word)."""
        state = state._replace(first=jnp.where(state.place == 0, tokens, state.first))
        behind = jnp.minimum(state.filled + 1, self.states_kept), (state.place + 1) % self.config.seq_len
        hidden = self._embed(embed, tokens[:, None])
        return *self._ask_for_word(params, hidden, state, state.layers[0], tokens, alive), state, behind

    def _ask_for_word(
        self, params: tuple[PyTree, PyTree], hidden: Any, state: ReadSoFar, kept: Kept, tokens: Array, alive: Any
    ) -> tuple[Asked, Kept]:
        """(what the layer's experts are asked, the layer's memory with this word)."""
        config, place = self.config, state.place[:, None]
        hidden = self._mixed(hidden).reshape(len(tokens), 1, -1)
        age = jnp.arange(self.states_kept, 0, -1)[None]  # the newest state has age 1
        is_filled = age <= state.filled[:, None]
        states = jnp.concatenate([kept.states, hidden], axis=1)[:, 1:]
        # With `same_length` a word sees mem_len states, its own among them.
        seen = is_filled & (age <= (config.mem_len - 1 if config.layer.same_length else place + config.mem_len))
        past = LayerMemory(kept.states, seen)
        if config.routes_tokens:
            rows = attention_segment(config)(params[1], hidden.reshape(len(tokens), -1), past)
            scores, inputs = score(self.router, params[0], rows, ids=tokens), expert_inputs(config, rows, past)
            return self._asked(alive, scores, inputs), Kept(states, kept.features)
        memory_mask = is_filled & (age > place) & (age <= place + config.mem_len)
        features = jnp.where(place == 0, routing_features(hidden, kept.states, memory_mask), kept.features)
        scores = score(self.router, params[0], features, ids=state.first)
        if not self.whole_segments:
            return self._asked(alive, scores, expert_inputs(config, hidden, past)), Kept(states, features)
        inputs = expert_inputs(config, *self._whole_segment(hidden, state, kept))
        return self._asked(alive, scores, inputs, at=state.place), Kept(states, features)

    def _whole_segment(self, hidden: Array, state: ReadSoFar, kept: Kept) -> tuple[Array, LayerMemory]:
        """The segment at hand as far as it was read, zeros behind, and the memory before it."""
        length, place = self.states_kept, state.place[:, None]
        memory_age = place + jnp.arange(self.config.mem_len, 0, -1)
        memory = _taken(kept.states, length - memory_age)
        positions = jnp.arange(self.config.seq_len)[None]
        before = _taken(kept.states, jnp.clip(length - (place - positions), 0, length - 1))
        own = jnp.where((positions < place)[..., None], before, 0)
        segment = jnp.where((positions == place)[..., None], hidden, own)
        return segment, LayerMemory(memory, memory_age <= state.filled[:, None])

    def _kept_states(self, read: SegmentsRead, tokens: Array, lengths: Array) -> tuple[ReadSoFar, Array]:
        size, length = self.config.seq_len, self.states_kept
        count = read.features[0].shape[1]
        segment = jnp.minimum(lengths // size, count - 1)
        layers = []
        for entered, features in zip(read.entered, read.features, strict=True):
            padded = jnp.pad(entered, ((0, 0), (length, 0), (0, 0)))
            states = _taken(padded, lengths[:, None] + np.arange(length))
            layers.append(Kept(states, _taken(features, segment[:, None])[:, 0]))
        first = jnp.take_along_axis(tokens, segment[:, None] * size, axis=1)[:, 0]
        state = ReadSoFar(tuple(layers), jnp.minimum(lengths, length), lengths % size, first)
        return state, _taken(read.hidden, lengths[:, None] - 1)


def _taken(states: Array, places: Array) -> Array:
    """The states [B, places, d_model] at places [B, places]; one below the first is that one, masked elsewhere."""
    return jnp.take_along_axis(states, jnp.maximum(places, 0)[..., None], axis=1)


def _layer_params(trunk: PyTree, layer: int) -> tuple[PyTree, PyTree]:
    """Parameters of a layer's gate, and of its attention where tokens are routed."""
    return trunk["gates"][layer], trunk["attention"][layer] if "attention" in trunk else None
