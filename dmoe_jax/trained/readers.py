"""Readers: a model's parameters together with its experts, at hand or in a swarm, and what reads with them.

Their methods are coroutines. Those of a `LocalReader` never wait, so that `without_waiting` drives them anywhere.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import trio
from jaxtyping import Array, Float

from dmoe_jax.arrays import PyTree
from dmoe_jax.autodiff import without_waiting
from dmoe_jax.machine.device import Device, to_host
from dmoe_jax.machine.remembered import remembered
from dmoe_jax.mixture.remote import RemoteMixture
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.layers import MixtureMaker, dmoe_layer, layer_mixtures
from dmoe_jax.models.trunk import Memory, empty_memory
from dmoe_jax.routing.base import Router
from dmoe_jax.trained.decoding import (
    Alive,
    Asked,
    Decoder,
    Each,
    ReadSoFar,
    SegmentsRead,
    Tokens,
    Unmixed,
    make_decoder,
)
from dmoe_jax.trained.patient_layer import PatientLayer

T = TypeVar("T")

_SHORT_S = 1e-3
"""Seconds that a program of a few rows takes, about."""


@runtime_checkable
class Reader(Protocol):
    """A model's parameters together with its experts, and the way to read with them."""

    decoder: Decoder
    trunk: PyTree

    async def read_segments(self, memory: Memory, tokens: Tokens, lengths: Each) -> SegmentsRead:
        """Read whole segments: see `Decoder.read_segments`."""
        ...

    async def read_word(self, state: ReadSoFar, tokens: Each) -> tuple[Array | Unmixed, ReadSoFar]:
        """Read a word: see `Decoder.read_word`."""
        ...

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)` with NumPy arrays in place of JAX's, without holding up an event loop."""
        ...


class LocalReader:
    """A reader whose experts are at hand.

    Args:
      trunk, experts: as of `init_trunk` and `init_experts`.
      alive: bool [num_layers, *grid_size], true for experts that may be chosen; None for all.
    """

    def __init__(
        self,
        config: TransformerXLConfig,
        router: Router,
        trunk: PyTree,
        experts: Sequence[PyTree],
        alive: Alive | None = None,
    ) -> None:
        self.decoder = make_decoder(config, router)
        # On the device once, and not with each word.
        self.trunk, self._experts, self._alive = jax.device_put((trunk, tuple(experts), alive))
        self._read_segments, self._read_word = _local_programs(self.decoder)

    async def read_segments(self, memory: Memory, tokens: Tokens, lengths: Each) -> SegmentsRead:
        return self._read_segments(self.trunk, self._experts, self._alive, memory, tokens, lengths)

    async def read_word(self, state: ReadSoFar, tokens: Each) -> tuple[Array | Unmixed, ReadSoFar]:
        return self._read_word(self.trunk, self._experts, self._alive, state, tokens)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return jax.tree.map(np.asarray, function(*args))


async def _at_once(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@remembered(8)
def _local_programs(decoder: Decoder) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The compiled `read_segments` and `read_word` of (trunk, experts, alive, *their own arguments)."""

    def program(read: Callable[..., Any]) -> Callable[..., Any]:
        def traced(trunk: PyTree, experts: Sequence[PyTree], alive: Any, *args: Any) -> Any:
            return without_waiting(read(_at_once, _local_mixes(decoder, experts, alive), trunk, *args))

        return jax.jit(traced)

    return program(decoder.read_segments), program(decoder.read_word)


def _local_mixes(decoder: Decoder, experts: Sequence[PyTree], alive: Any) -> list["_LocalMix"]:
    return [_LocalMix(decoder, own, None if alive is None else alive[layer]) for layer, own in enumerate(experts)]


class _LocalMix:
    def __init__(self, decoder: Decoder, params: PyTree, alive: Any) -> None:
        self._decoder, self._params, self._alive = decoder, params, alive

    async def alive(self) -> None:
        return None  # `dmoe_layer` chooses by itself

    async def __call__(self, asked: Asked) -> Array:
        config, router, inputs = self._decoder.config, self._decoder.router, map(jnp.asarray, asked.inputs)
        return dmoe_layer(config.expert(), self._params, router, config.k_best, asked.scores, self._alive, *inputs)[0]


def pure_log_probs(
    config: TransformerXLConfig,
    router: Router,
    trunk: PyTree,
    experts: Sequence[PyTree],
    tokens: Tokens,
    alive: Alive | None,
) -> Float[Array, "B T vocab"]:
    """Log-probability of every word after each of `tokens`, nats, to be jitted and differentiated by the caller."""
    decoder, (batch, length) = make_decoder(config, router), tokens.shape
    padded = jnp.pad(tokens, ((0, 0), (0, -length % config.seq_len)))
    mixes, lengths = _local_mixes(decoder, experts, alive), jnp.full(batch, length)
    read = without_waiting(decoder.read_segments(_at_once, mixes, trunk, empty_memory(config, batch), padded, lengths))
    return decoder.log_probs(trunk, read.hidden[:, :length])


class ThreadReader:
    """A `LocalReader` for code under trio: it reads in a worker thread, so that others may go on meanwhile.

    If cancelled, what is being read is read to its end in vain, and whoever comes next waits for that.
    """

    def __init__(self, reader: LocalReader) -> None:
        self.decoder, self.trunk, self._reader = reader.decoder, reader.trunk, reader
        self._limiter = trio.CapacityLimiter(1)

    async def read_segments(self, memory: Memory, tokens: Tokens, lengths: Each) -> SegmentsRead:
        return await self._in_thread(self._reader.read_segments, memory, tokens, lengths)

    async def read_word(self, state: ReadSoFar, tokens: Each) -> tuple[Array | Unmixed, ReadSoFar]:
        return await self._in_thread(self._reader.read_word, state, tokens)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._in_thread(self._reader.run, function, *args)

    async def _in_thread(self, read: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        def work() -> T:
            return without_waiting(read(*args))

        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)


class SwarmReader:
    """A reader whose experts answer in a swarm, and do not learn from it.

    Args:
      swarm: makes the mixtures. trunk: of `init_trunk`.
      timeout_s: seconds after which a call is given up, and made again.
      patience_s: as of `PatientLayer`.
    """

    def __init__(
        self,
        config: TransformerXLConfig,
        router: Router,
        trunk: PyTree,
        swarm: MixtureMaker,
        *,
        timeout_s: float = 10.0,
        patience_s: float = 60.0,
    ) -> None:
        self.decoder, self.trunk = make_decoder(config, router, whole_segments=True), jax.device_put(trunk)
        settings: dict[str, Any] = {"k_best": config.k_best, "grace_s": float("inf"), "timeout_s": timeout_s}
        made = layer_mixtures(swarm, config.expert(), router, config.num_layers, **settings)
        self.mixtures = cast(list[RemoteMixture], made)
        self.layers = tuple(PatientLayer(mixture, self._run, patience_s=patience_s) for mixture in self.mixtures)
        self._device: Device = self.mixtures[0].device
        self._compiled: set[Any] = set()
        self._is_checked = False

    async def read_segments(self, memory: Memory, tokens: Tokens, lengths: Each) -> SegmentsRead:
        if not self._is_checked:  # of every text segments are read first
            for mixture in self.mixtures:
                await mixture.check()
            self._is_checked = True
        return await self.decoder.read_segments(self._run, self.layers, self.trunk, memory, tokens, lengths)

    async def read_word(self, state: ReadSoFar, tokens: Each) -> tuple[Array | Unmixed, ReadSoFar]:
        return await self.decoder.read_word(self._run, self.layers, self.trunk, state, tokens)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await to_host(self._device, await self._run(function, *args))

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        # What was compiled for these shapes is short work; compiling would hold up the event loop.
        shapes = tuple(getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(args))
        expected_s = _SHORT_S if (function, shapes) in self._compiled else float("inf")
        result = await self._device.run(function, *args, expected_s=expected_s)
        self._compiled.add((function, shapes))
        return result
