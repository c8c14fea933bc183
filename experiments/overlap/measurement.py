"""Many asynchronous trainers in one process, each remote call delayed: wall time of a step over its critical path."""

import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median

import jax
import numpy as np
import optax
import trio
from matplotlib.figure import Figure

from dmoe_jax.data.batches import SegmentStream
from dmoe_jax.device import ThreadDevice
from dmoe_jax.directory import open_expert_directory
from dmoe_jax.grid import all_uids
from dmoe_jax.mixture.fan_out import CallPolicy, CallStatistics, ExpertCaller
from dmoe_jax.mixture.remote import MixtureConfig, RemoteMixture
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.server import NodeConfig, open_expert_node
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.trainer import SwarmModel, Trainer
from dmoe_jax.trunk import SharedTrunk
from experiments.bench import Experiment, Run
from experiments.overlap.settings import OverlapSettings
from experiments.panels import draw_rounds
from experiments.results import Bar, Result
from net.clock import SwarmClock
from net.dht.node import DhtNode, open_dht_node
from net.errors import NetError
from net.identity import Address, PeerId
from net.rpc.faults import Fault, FaultInjector, FaultPlan
from net.rpc.peer import RpcPeer, open_rpc_peer
from net.transport.tcp import TcpTransport

GRID = (2, 2)
BAR = Bar(name="overlap_ratio", bound=1.5)
"""A round may take this multiple of the waits on its critical path."""

_NUM_NODES = 2


class FarAway(FaultInjector):
    """Serves every expert call late by the same time, as a node far away does.

    Args:
      delay_s: how late.
    """

    def __init__(self, delay_s: float) -> None:
        super().__init__(FaultPlan())
        self._delay_s = delay_s

    def of(self, server: PeerId) -> "FarAway":
        return self

    def draw(self, caller: PeerId, method: str) -> tuple[Fault, float] | None:
        return (Fault.LATE, self._delay_s) if method in ("expert.forward", "expert.backward") else None


async def measure(run: Run[OverlapSettings]) -> None:
    """Let all trainers take a step at once, round after round."""
    settings = run.settings
    async with _open_trainers(settings) as trainers:
        run.say("one step alone, to compile")
        await trainers[0].step()
        for number in range(1, settings.chosen_steps + 1):
            started = time.perf_counter()
            async with trio.open_nursery() as nursery:
                for trainer in trainers:
                    nursery.start_soon(trainer.step)
            wall_s = time.perf_counter() - started
            run.log("round", step=number, wall_s=wall_s, critical_path_s=settings.critical_path_s)
            run.say(
                f"round {number}/{settings.chosen_steps}: {wall_s:.2f} s for a critical path of "
                f"{settings.critical_path_s:g} s"
            )


@asynccontextmanager
async def _open_trainers(settings: OverlapSettings) -> AsyncIterator[list[Trainer]]:
    """Open two nodes and the trainers, all in this process, joined by TCP."""
    config = txl.TransformerXLConfig(
        vocab_size=500,
        d_model=32,
        num_layers=settings.num_layers,
        num_heads=2,
        d_ff=64,
        seq_len=16,
        mem_len=16,
        grid_size=GRID,
        k_best=2,
    )
    router, device, rng = product_key(GRID), ThreadDevice(), random.Random(settings.seed)
    async with AsyncExitStack() as stack:
        peers: list[RpcPeer] = []
        dhts: list[DhtNode] = []
        for listen in (*([Address("127.0.0.1", 0)] * _NUM_NODES), None):
            peer = open_rpc_peer(
                TcpTransport(), peer_id=PeerId.draw(rng), listen=listen, faults=FarAway(settings.delay_s)
            )
            peers.append(await stack.enter_async_context(peer))
            dht = open_dht_node(
                peers[-1],
                clock=SwarmClock.wall(),
                rng=rng,
                initial_peers=[first for peer in peers[:-1][:1] if (first := peer.address) is not None],
                client_mode=listen is None,
            )
            dhts.append(await stack.enter_async_context(dht))
        await _serve(stack, settings, config, peers[:_NUM_NODES], dhts, device)
        directory = await stack.enter_async_context(open_expert_directory(dhts[-1]))
        caller = ExpertCaller(peers[-1], directory, CallStatistics())
        policy = CallPolicy(grace_s=60.0, timeout_s=60.0)
        mixtures = [
            RemoteMixture(
                expert=config.expert(),
                router=router,
                directory=directory,
                caller=caller,
                device=device,
                config=MixtureConfig(prefix=f"layer{layer}", k_best=2, policy=policy),
            )
            for layer in range(settings.num_layers)
        ]
        model = SwarmModel(config, txl.segments(config, router), mixtures)
        trunk = SharedTrunk(txl.init_trunk(jax.random.key(settings.seed), config, router), optax.adam(1e-3), device)
        text = np.random.default_rng(settings.seed).integers(0, config.vocab_size, 20_000)
        yield [
            Trainer(
                i, model, trunk, SegmentStream(text, batch_size=1, seq_len=16, shard=i, num_shards=settings.trainers)
            )
            for i in range(settings.trainers)
        ]


async def _serve(
    stack: AsyncExitStack,
    settings: OverlapSettings,
    config: txl.TransformerXLConfig,
    peers: Sequence[RpcPeer],
    dhts: Sequence[DhtNode],
    device: ThreadDevice,
) -> None:
    """Open one expert node on each peer; experts are dealt out in turn."""
    uids = [str(uid) for layer in range(settings.num_layers) for uid in all_uids(f"layer{layer}", GRID)]
    optimizer = optax.adam(1e-3)
    for index, peer in enumerate(peers):
        backends = {
            uid: ExpertBackend(config.expert(), optimizer, config.expert().init(jax.random.key(number)))
            for number, uid in enumerate(uids)
            if number % len(peers) == index
        }
        # A round brings up to one row a trainer to one expert.
        await device.run(next(iter(backends.values())).warm_up, settings.trainers)
        node = open_expert_node(
            peer,
            dhts[index],
            backends,
            device=device,
            config=NodeConfig(max_concurrent_calls=4 * settings.trainers),
        )
        await stack.enter_async_context(node)


def _rounds_s(run: Run[OverlapSettings]) -> list[float]:
    return [record["wall_s"] for record in run.records("round")]


def summarise(run: Run[OverlapSettings]) -> Result | None:
    """Compute the median round over its critical path; None before the first round."""
    settings, rounds_s = run.settings, _rounds_s(run)
    if not rounds_s:
        return None
    figures = {
        "trainers": settings.trainers,
        "delay_s": settings.delay_s,
        "num_layers": settings.num_layers,
        "rounds": len(rounds_s),
        "critical_path_s": settings.critical_path_s,
        "median_wall_s": median(rounds_s),
        "overlap_ratio": median(rounds_s) / settings.critical_path_s,
    }
    return Result(title="Overlap of asynchronous trainers", figures=figures, bars=[BAR])


def draw(run: Run[OverlapSettings], result: Result) -> Figure:
    """Draw the wall time of each round beside the waits on its critical path."""
    del result
    wait_s = run.settings.critical_path_s
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    draw_rounds(
        figure.add_subplot(),
        f"One step of {run.settings.trainers} trainers that wait for remote experts (seconds)",
        _rounds_s(run),
        reference=(wait_s, f"waits of one step {wait_s:.1f} s"),
        bar=(BAR.bound * wait_s, f"bar {BAR.bound * wait_s:.1f} s"),
    )
    return figure


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Wall time of each round beside the waits on its critical path",
    expected=(NetError, FloatingPointError),
)
