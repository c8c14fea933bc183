"""Putting a training run together: model, trunk, mixtures, trainers; and making sure that the swarm fits them."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import trio

from dmoe_jax.cli.common import UsageError, one_line
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.data.batches import SegmentStream
from dmoe_jax.data.corpora import Corpus
from dmoe_jax.device import Device, ThreadDevice
from dmoe_jax.directory import ExpertDirectory
from dmoe_jax.grid import ExpertUid, all_uids, layer_prefix
from dmoe_jax.mixture.fan_out import CallPolicy, CallStatistics, ExpertCaller
from dmoe_jax.mixture.remote import MixtureConfig, RemoteMixture
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.node.requests import describe_spec
from dmoe_jax.peer import SwarmPeer
from dmoe_jax.recipe import decay_learning_weights
from dmoe_jax.routing.base import Router
from dmoe_jax.routing.check import check_router
from dmoe_jax.routing.registry import make_router
from dmoe_jax.trainer import Trainer
from dmoe_jax.trunk import SharedTrunk
from net.errors import CallFailed, NetError, NoQuorum, PeerUnavailable, RemoteProtocolError
from net.identity import Contact
from net.rpc.base import Body
from net.wire.compression import Compression

_WAIT_FOR_EXPERTS_S = 60.0
"""A node that was started together with us may still be compiling."""

_TOLERABLE_SKEW_S = 3.0
"""Clocks that differ by more are worth a word when nothing is found."""

_INFO_TIMEOUT_S = 3.0
"""For an expert to say what it is; then the next one is asked."""

_ASK_PERIOD_S = 0.5
"""Between two looks for experts while there are none."""

_DROPOUT_KEY = "dropout_key"
"""The input that an expert has only if it drops anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """What a run is made of."""

    corpus: Corpus
    """The text."""
    config: TransformerXLConfig
    """Sizes of the model."""
    router: Router
    """The router of every layer."""
    model: txl.TransformerXL
    """The model with its remote mixtures."""
    trunk: SharedTrunk
    """Parameters that the trainers share."""
    trainers: tuple[Trainer, ...]
    """The asynchronous trainers of this process."""
    statistics: CallStatistics
    """Totals of their expert calls."""
    device: Device
    """Runs their XLA work."""


@contextlib.contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """What a wrong setting, a damaged file or a full folder raises while a run is set up is the user's to mend."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from error


def checked_router(command: TrainCommand) -> Router:
    """The router that the command names, after a trial: before the swarm hears of us.

    Raises:
      UsageError: there is no such router, or it does not keep to its contract. The message names it.
    """
    with mistakes_in_one_line():
        router = make_router(command.router, command.grid_size)
        check_router(router, command.grid_size, command.expert.d_model)
    return router


def assemble(
    command: TrainCommand, peer: SwarmPeer, router: Router, corpus: Corpus, directory: ExpertDirectory
) -> TrainingParts:
    """Everything that the command's flags describe, with the router that `checked_router` made of them.

    Raises:
      ValueError: for sizes that do not fit each other or the text.
    """
    config = model_config(command, len(corpus.vocabulary))
    device = ThreadDevice()
    caller = ExpertCaller(peer.rpc, directory, CallStatistics())
    mixtures = _mixtures(command, config, router, device, directory, caller)
    model = txl.TransformerXL(config, router, mixtures)
    trunk = _trunk(command, config, router, device, corpus)
    seed = command.seed if command.data_seed is None else command.data_seed
    streams = [
        SegmentStream(
            corpus.train,
            batch_size=command.batch_size,
            seq_len=config.seq_len,
            shard=shard,
            num_shards=command.num_trainers,
            seed=seed,
        )
        for shard in range(command.num_trainers)
    ]
    trainers = tuple(Trainer(index, model, trunk, stream, seed=seed) for index, stream in enumerate(streams))
    return TrainingParts(
        corpus=corpus,
        config=config,
        router=router,
        model=model,
        trunk=trunk,
        trainers=trainers,
        statistics=caller.statistics,
        device=device,
    )


def model_config(command: TrainCommand, vocab_size: int) -> TransformerXLConfig:
    """Sizes and rates of the command's model over this vocabulary.

    Raises:
      ValueError: they do not fit each other.
    """
    return TransformerXLConfig(
        layer=command.expert,
        vocab_size=vocab_size,
        num_layers=command.num_layers,
        embedding_dropout=command.embedding_dropout,
        input_dropout=command.input_dropout,
        output_dropout=command.output_dropout,
        grid_size=command.grid_size,
        k_best=command.k_best,
        # A small vocabulary has no words beyond the later cutoffs.
        cutoffs=tuple(cutoff for cutoff in command.cutoffs if cutoff < vocab_size),
    )


def _mixtures(
    command: TrainCommand,
    config: TransformerXLConfig,
    router: Router,
    device: Device,
    directory: ExpertDirectory,
    caller: ExpertCaller,
) -> list[RemoteMixture]:
    policy = CallPolicy(
        k_min=command.k_min,
        grace_s=command.grace_s,
        timeout_s=command.timeout_s,
        compression=Compression(command.compression),
    )
    return [
        RemoteMixture(
            expert=config.expert(),
            router=router,
            directory=directory,
            caller=caller,
            device=device,
            config=MixtureConfig(prefix=layer_prefix(layer), k_best=command.k_best, policy=policy),
        )
        for layer in range(config.num_layers)
    ]


def _trunk(
    command: TrainCommand, config: TransformerXLConfig, router: Router, device: Device, corpus: Corpus
) -> SharedTrunk:
    # A short run keeps most of its steps for learning; Optax would refuse a warm-up longer than the run.
    warmup_steps = min(command.warmup_steps, command.steps // 4)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        command.learning_rate,
        warmup_steps,
        command.steps,
        end_value=command.learning_rate_floor * command.learning_rate,
    )
    decay = [decay_learning_weights(command.weight_decay)] if command.weight_decay else []
    optimizer = optax.chain(optax.clip_by_global_norm(command.grad_clip), *decay, optax.adam(schedule))
    optimizer = command.averaging.wrap(optimizer)
    counts = np.bincount(corpus.train, minlength=config.vocab_size)
    params = txl.init_trunk(jax.random.key(command.seed), config, router, word_counts=counts)
    return SharedTrunk(params, optimizer, device)


async def wait_for_experts(
    parts: TrainingParts, peer: SwarmPeer, directory: ExpertDirectory, say: Callable[[str], None]
) -> None:
    """Wait until every layer has a living expert, and check that its shapes are the model's.

    Raises:
      NoQuorum: naming the layer, when there is none within a minute; or none of those announced answers.
      UsageError: when the swarm's experts have other shapes.
    """
    expert = parts.config.expert()
    ours = [describe_spec(spec) for spec in (*expert.inputs, expert.output)]
    for layer in range(parts.config.num_layers):
        uids = all_uids(layer_prefix(layer), parts.config.grid_size)
        living = await _living_experts(peer, directory, layer, uids)
        uid, info = await _first_info(peer, living)
        theirs = [*info.get("inputs", []), info.get("output")]
        if theirs != ours:
            raise UsageError(
                f"the experts of this swarm have other shapes: expert {uid} at {living[uid]} is a "
                f"{info.get('kind')} with {_shapes(theirs)}, this model needs {_shapes(ours)}; "
                f"give {_flags_to_mend(theirs, ours)}"
            )
        say(f"{layer_prefix(layer)}: {len(living)} of {len(uids)} experts alive")


async def _living_experts(
    peer: SwarmPeer, directory: ExpertDirectory, layer: int, uids: tuple[ExpertUid, ...]
) -> dict[ExpertUid, Contact]:
    """The living experts of a layer: at least one, or NoQuorum after a minute of asking twice a second."""
    for _ in range(int(_WAIT_FOR_EXPERTS_S / _ASK_PERIOD_S)):
        found = await directory.find_experts(uids)
        if living := {uid: contact for uid, contact in found.items() if contact is not None}:
            return living
        await trio.sleep(_ASK_PERIOD_S)
    skew_s = peer.dht.statistics().clock_skew_s or 0.0
    # Announcements carry absolute times: to a clock that is fast by more than their life they are all over.
    clocks = f"; the swarm's clock and this one differ by {skew_s:+.0f} s" if abs(skew_s) > _TOLERABLE_SKEW_S else ""
    raise NoQuorum(f"no expert of {layer_prefix(layer)!r} was announced within {_WAIT_FOR_EXPERTS_S:.0f} s{clocks}")


async def _first_info(peer: SwarmPeer, living: Mapping[ExpertUid, Contact]) -> tuple[ExpertUid, Body]:
    """What the first expert that answers says of itself. A node that was just killed is listed for a while longer, and
    others may be meant to fail now and then.

    Raises:
      NoQuorum: none answers.
    """
    failure: NetError | None = None
    for uid, contact in living.items():
        try:
            reply = await peer.rpc.call(contact, "expert.info", {"uid": str(uid)}, timeout_s=_INFO_TIMEOUT_S)
        except (PeerUnavailable, CallFailed, RemoteProtocolError) as error:
            failure = error
        else:
            return uid, reply.body
    raise NoQuorum(f"experts are announced, but none of {len(living)} answers; the last one: {failure}")


def _shapes(specs: list[Any]) -> str:
    with contextlib.suppress(TypeError, KeyError):
        return ", ".join(f"{spec['name']} {spec['dtype']}{spec['shape']}" for spec in specs)
    return repr(specs)[:200]


def _flags_to_mend(theirs: list[Any], ours: list[Any]) -> str:
    """Which flags make our model fit their experts."""
    we_drop, they_drop = (any(_name(spec) == _DROPOUT_KEY for spec in specs) for specs in (ours, theirs))
    if we_drop == they_drop:
        return "--d-model, --seq-len and --mem-len as on the nodes"
    if they_drop:
        return "--dropout, --attention-dropout or --position-dropout above 0: the nodes' experts take dropout keys"
    return "no --dropout, --attention-dropout or --position-dropout: the nodes' experts take no dropout keys"


def _name(spec: Any) -> Any:
    return spec.get("name") if isinstance(spec, Mapping) else None
