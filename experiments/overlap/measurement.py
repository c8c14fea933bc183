"""Many asynchronous trainers in one process, each remote call delayed: wall time of a step over its critical path."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median

import numpy as np
import optax
import trio
from matplotlib.figure import Figure

from dmoe_jax import Swarm, open_swarm
from dmoe_jax.data.batches import SegmentStream
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.mixture.statistics import CallStatistics
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.transformer_xl import TransformerXL
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.peers.peer import Seams
from dmoe_jax.peers.security import Plain
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.trainer import Trainer
from dmoe_net.errors import NetError
from dmoe_net.identity import Address, PeerId
from dmoe_net.keys import Identity
from dmoe_net.rpc.faults import Fault, FaultInjector, FaultPlan
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.tcp import TcpTransport
from experiments.bench import Experiment, Run
from experiments.overlap.settings import OverlapSettings
from experiments.panels import draw_rounds
from experiments.results import Bar, Result

GRID = (2, 2)
BAR = Bar(name="overlap_ratio", bound=1.5)
"""A round may take this multiple of the waits on its critical path."""

_MAX_CALL_S = 60.0
"""No call takes so long: a step waits for every expert that it asked."""


class FarAway(FaultInjector):
    """Serves every expert call late by the same time, as a node far away does."""

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
    async with _open_trainers(settings) as (trainers, statistics):
        run.say("one step alone, to compile")
        await trainers[0].step()
        for number in range(1, settings.chosen_steps + 1):
            failed, started = statistics.failed, time.perf_counter()
            async with trio.open_nursery() as nursery:
                for trainer in trainers:
                    nursery.start_soon(trainer.step)
            wall_s, failed = time.perf_counter() - started, statistics.failed - failed
            wait_s = settings.critical_path_s
            run.log("round", step=number, wall_s=wall_s, critical_path_s=wait_s, failed_calls=failed)
            run.say(f"round {number}/{settings.chosen_steps}: {wall_s:.2f} s for a critical path of {wait_s:g} s")


@asynccontextmanager
async def _open_trainers(settings: OverlapSettings) -> AsyncIterator[tuple[Sequence[Trainer], CallStatistics]]:
    """Open two nodes and the trainers, all in this process, joined by TCP."""
    config = TransformerXLConfig(
        vocab_size=500,
        num_layers=settings.num_layers,
        grid_size=GRID,
        k_best=2,
        layer=LayerConfig(d_model=32, num_heads=2, d_ff=64, seq_len=16, mem_len=16),
    )
    # A round brings up to one row a trainer to one expert.
    node = NodeConfig(max_concurrent_calls=4 * settings.trainers, warm_up_rows=settings.trainers)
    async with AsyncExitStack() as stack:
        join: tuple[str, ...] = ()
        for row in range(GRID[0]):
            swarm = await stack.enter_async_context(_open_far_away(join, settings))
            experts = {f"layer{layer}.{row}.[0:{GRID[1]}]": config.expert() for layer in range(settings.num_layers)}
            await swarm.serve(experts, optimizer=optax.adam(1e-3), config=node)
            join = (swarm.contact,)
        swarm = await stack.enter_async_context(open_swarm(join, security=Plain(), listen=None, seed=settings.seed))
        model = TransformerXL.on(
            swarm, config, product_key(GRID), grace_s=_MAX_CALL_S, timeout_s=_MAX_CALL_S, on_shortfall="raise"
        )
        text = np.random.default_rng(settings.seed).integers(0, config.vocab_size, 20_000)
        batches = [
            SegmentStream(text, batch_size=1, seq_len=16, shard=shard, num_shards=settings.trainers)
            for shard in range(settings.trainers)
        ]
        yield swarm.trainer(model, optax.adam(1e-3), batches).trainers, swarm.statistics


@asynccontextmanager
async def _open_far_away(join: Sequence[str], settings: OverlapSettings) -> AsyncIterator[Swarm]:
    """Open a peer that serves expert calls late."""
    identity, anywhere, faults = Identity.generate(), Address("127.0.0.1", 0), FarAway(settings.delay_s)
    async with (
        open_rpc_peer(TcpTransport(), peer_id=identity.peer_id, listen=anywhere, faults=faults) as peer,
        open_swarm(join, seed=settings.seed, testing=Seams(caller=peer, identity=identity)) as swarm,
    ):
        yield swarm


def summarise(run: Run[OverlapSettings]) -> Result | None:
    """Compute the median round over its critical path; None before the first round."""
    settings, rounds = run.settings, run.records("round")
    if not rounds:
        return None
    median_s = median(each["wall_s"] for each in rounds)
    figures = {
        "trainers": settings.trainers,
        "delay_s": settings.delay_s,
        "num_layers": settings.num_layers,
        "rounds": len(rounds),
        "critical_path_s": settings.critical_path_s,
        "median_wall_s": median_s,
        "overlap_ratio": median_s / settings.critical_path_s,
        "failed_calls": sum(each["failed_calls"] for each in rounds),
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
        [record["wall_s"] for record in run.records("round")],
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
