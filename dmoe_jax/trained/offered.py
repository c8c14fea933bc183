"""A model that a living swarm gives to whoever asks: sizes, vocabulary and trunk, for the experts of its nodes.

Trainers that others can call offer what they train, as states are offered to newcomers
(`dmoe_net.averaging.state.sharing`): as arrays the vocabulary and its tokenizer, bytes each, then the trunk's leaves in
their order; as facts the sizes and the router's name. All of it is a stranger's: it is checked, none of it is run.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from dmoe_jax.arrays import PyTree
from dmoe_jax.averaging.donor import donor_source, is_finite_state, table_of, tree_like
from dmoe_jax.data.pieces import AnyVocabulary
from dmoe_jax.data.saved_vocabulary import MOST_BYTES, packed_vocabulary, vocabulary_untrusted
from dmoe_jax.data.tokenizers import MAX_BYTES
from dmoe_jax.machine.device import Device
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.transformer_xl import trunk_shapes
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_jax.routing.registry import make_router
from dmoe_jax.runs.run_folder import plain
from dmoe_jax.trained.saved_model import SavedModel, config_of
from dmoe_net.averaging.state.buffer import Table
from dmoe_net.averaging.state.download import StateUnavailable, download_state
from dmoe_net.averaging.state.sharing import SharedState, StateSharing, StateSharingConfig, StateSource
from dmoe_net.errors import NetError, RemoteProtocolError

_MOST_BYTES = 1 << 33
"""Size of a model's trunk and vocabulary at most."""
_MOST_EXPERTS = 1 << 24
"""Experts of a model at most."""
_MOST_DIMENSIONS = 16
"""Dimensions of a grid at most."""
_MOST_CHARACTERS = 1000
"""Characters of a router's name at most."""

_CONFIG = StateSharingConfig(max_bytes=_MOST_BYTES)


class NoModelOffered(NetError):
    """Nobody in the swarm gives its model, or what was given is of no use."""


class RouterNotNamed(ValueError):
    """The router of a model is out of a file: none is run only because a peer names it."""


async def offer_model(
    peer: SwarmPeer,
    swarm: str,
    config: TransformerXLConfig,
    router: str,
    vocabulary: AnyVocabulary,
    state: Callable[[], tuple[int, PyTree]],
    device: Device,
) -> None:
    """Give the model to whoever asks, until cancelled. A client, whom nobody can call, has nothing to do.

    Args:
      router: name of the model's router, as `make_router` takes it.
      state: returns how many updates the trunk has taken, and its parameters; called from the event loop.
    """
    facts = {"config": plain(asdict(config)), "router": router}
    words = tuple(np.frombuffer(part, np.uint8) for part in packed_vocabulary(vocabulary))
    trunk = donor_source(state, device)

    async def snapshot() -> SharedState:
        own = await trunk.snapshot()
        return SharedState(version=own.version, tensors=(*words, *own.tensors), facts=facts)

    source = StateSource(trunk.version, snapshot)
    await StateSharing(peer.rpc, peer.dht, prefix=_prefix(swarm), source=source, config=_CONFIG).run()


async def fetch_model(
    peer: SwarmPeer, swarm: str, *, router: str | None = None, timeout_s: float = 60.0
) -> tuple[SavedModel, AnyVocabulary]:
    """The model that trainers of a swarm train, without its experts.

    Args:
      router: the model's router, as `make_router` takes it, if it is out of a file; None: as the trainers say.

    Raises:
      NoModelOffered: nobody gives one that is of use. RouterNotNamed: its router is out of a file.
    """
    found: list[tuple[SavedModel, AnyVocabulary]] = []
    refused: list[Exception] = []

    def accepts(state: SharedState) -> bool:
        # Whoever gives what is of no use is not asked again, so that the models of others are looked at.
        try:
            found.append(_model_untrusted(state, router))
        except (RemoteProtocolError, RouterNotNamed) as error:
            refused.append(error)
        return bool(found)

    try:
        state = await download_state(
            peer.rpc,
            peer.dht,
            prefix=_prefix(swarm),
            rng=random.Random(0),
            config=_CONFIG,
            timeout_s=timeout_s,
            attempts=3,
            expects=lambda version, table: _has_vocabulary(table),
            accepts=accepts,
        )
    except StateUnavailable as error:
        if unnamed := next((each for each in refused if isinstance(each, RouterNotNamed)), None):
            raise unnamed from error
        why = f"is of no use: {refused[-1]}" if refused else f"cannot be had: {error}"
        raise NoModelOffered(f"the model of swarm {swarm!r} {why}") from error
    if state is None:
        raise NoModelOffered(
            f"nobody in swarm {swarm!r} gives its model: trainers do that others can call, with --average-every or "
            "--target-batch-size; else name the folder of a run"
        )
    return found[0]


def _has_vocabulary(table: Table) -> bool:
    """True if arrays of these types and shapes may be a vocabulary, no larger than one can be, and a trunk behind."""
    limits = zip(table, (MOST_BYTES, MAX_BYTES), strict=False)
    return len(table) > 2 and all(
        name == "uint8" and len(shape) == 1 and shape[0] <= most for (name, shape), most in limits
    )


def _model_untrusted(state: SharedState, router: str | None) -> tuple[SavedModel, AnyVocabulary]:
    if not is_finite_state(state):
        raise RemoteProtocolError("its numbers are not all finite")
    spec = state.facts.get("router")
    if not isinstance(spec, str) or len(spec) > _MOST_CHARACTERS or len(state.tensors) < 2:
        raise RemoteProtocolError("expected the router's name, and a vocabulary before the trunk")
    if router is None and (":" in spec or spec.endswith(".py")):
        raise RouterNotNamed(
            f"the router of the model is out of a file of its trainers, {spec!r}; name a file of your own with --router"
        )
    record, tokenizer, *leaves = state.tensors
    where = "the vocabulary of the swarm"
    try:
        vocabulary = vocabulary_untrusted(_bytes(record), lambda name: _bytes(tokenizer), where=where)
        config = _config_untrusted(state.facts.get("config"), len(vocabulary))
        chosen = make_router(router or spec, config.grid_size)
        # Zeros that take no memory: nothing says yet that these sizes are honest.
        like = jax.tree.map(
            lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), trunk_shapes(config, chosen)
        )
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise RemoteProtocolError(str(error)) from error
    if [[leaf.dtype.name, list(leaf.shape)] for leaf in leaves] != table_of(like):
        raise RemoteProtocolError("its arrays have other shapes than its sizes say")
    trunk = tree_like(like, leaves)
    known = np.zeros((config.num_layers, *config.grid_size), bool)
    return SavedModel(
        config=config, router=chosen, step=state.version, trunk=trunk, experts=(), known=known
    ), vocabulary


def _config_untrusted(sizes: Any, vocab_size: int) -> TransformerXLConfig:
    """The configuration in what a peer says. Raises ValueError if it is none."""
    if not isinstance(sizes, Mapping) or not isinstance(sizes.get("layer"), Mapping):
        raise ValueError("expected the model's sizes")
    config = config_of({**sizes, "layer": dict(sizes["layer"])}, vocab_size)
    if len(config.grid_size) > _MOST_DIMENSIONS:
        raise ValueError(f"a grid of {len(config.grid_size)} dimensions has too many")
    if 4 * config.num_layers * (config.seq_len + config.mem_len) * config.d_model > _MOST_BYTES:
        raise ValueError(f"segments of {config.seq_len} words and a memory of {config.mem_len} are too long")
    if math.prod(config.grid_size) * config.num_layers > _MOST_EXPERTS:
        raise ValueError(f"{config.num_layers} layers of a grid {config.grid_size} are too many")
    return config


def _bytes(tensor: Any) -> bytes:
    if tensor.dtype != np.uint8 or tensor.ndim != 1:
        raise ValueError(f"expected bytes, got {tensor.dtype}{list(tensor.shape)}")
    return bytes(tensor)


def _prefix(swarm: str) -> str:
    return f"{swarm}.model"
