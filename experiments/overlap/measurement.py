"""Many asynchronous trainers in one process, each remote call delayed: wall time of a step over its critical path."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median

import numpy as np
import optax
import trio

from dmoe_jax import NodeConfig, Plain, Swarm, Trainers, open_swarm, product_key
from dmoe_jax.data import SegmentStream
from dmoe_jax.models import LayerConfig, TransformerXL, TransformerXLConfig
from dmoe_jax.peers.peer import Seams
from dmoe_net import Address, Fault, FaultInjector, FaultPlan, Identity, NetError, PeerId, TcpTransport, open_rpc_peer
from experiments.bench import Experiment, Run
from experiments.overlap.settings import OverlapSettings
from experiments.results import Bar, Result

GRID = (2, 2)
NUM_LAYERS = 2
BAR = Bar(name="overlap_ratio", bound=1.5)
"""A round may take this multiple of the waits on its critical path: there and back for each layer."""


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
    steps = 3 if run.settings.quick else run.settings.steps
    async with _open_trainers(run.settings) as (swarm, trainers):
        run.say("one step alone, to compile")
        await trainers.trainers[0].step()
        for number in range(1, steps + 1):
            failed, started = swarm.statistics.failed, time.perf_counter()
            async with trio.open_nursery() as nursery:
                for trainer in trainers.trainers:
                    nursery.start_soon(trainer.step)
            wall_s, failed = time.perf_counter() - started, swarm.statistics.failed - failed
            run.log("round", step=number, wall_s=wall_s, failed_calls=failed)
            run.say(f"round {number}/{steps}: {wall_s:.2f} s")


@asynccontextmanager
async def _open_trainers(settings: OverlapSettings) -> AsyncIterator[tuple[Swarm, Trainers]]:
    """Open two nodes and the trainers, all in this process, joined by TCP."""
    layer = LayerConfig(d_model=32, num_heads=2, d_ff=64, seq_len=16, mem_len=16)
    config = TransformerXLConfig(vocab_size=500, num_layers=NUM_LAYERS, grid_size=GRID, k_best=2, layer=layer)
    # A round brings up to one row a trainer to one expert.
    node = NodeConfig(max_concurrent_calls=4 * settings.trainers, warm_up_rows=settings.trainers)
    async with AsyncExitStack() as stack:
        join: tuple[str, ...] = ()
        for row in range(GRID[0]):
            identity, anywhere, faults = Identity.generate(), Address("127.0.0.1", 0), FarAway(settings.delay_s)
            opening = open_rpc_peer(TcpTransport(), peer_id=identity.peer_id, listen=anywhere, faults=faults)
            seams = Seams(caller=await stack.enter_async_context(opening), identity=identity)
            swarm = await stack.enter_async_context(open_swarm(join, seed=settings.seed, testing=seams))
            experts = {f"layer{index}.{row}.[0:{GRID[1]}]": config.expert() for index in range(NUM_LAYERS)}
            await swarm.serve(experts, optimizer=optax.adam(1e-3), config=node)
            join = (swarm.contact,)
        swarm = await stack.enter_async_context(open_swarm(join, security=Plain(), listen=None, seed=settings.seed))
        # No call takes a minute: a step waits for every expert that it asked.
        router = product_key(GRID)
        model = TransformerXL.on(swarm, config, router, grace_s=60.0, timeout_s=60.0, on_shortfall="raise")
        text = np.random.default_rng(settings.seed).integers(0, config.vocab_size, 20_000)
        batches = [
            SegmentStream(text, batch_size=1, seq_len=16, shard=shard, num_shards=settings.trainers)
            for shard in range(settings.trainers)
        ]
        yield swarm, swarm.trainer(model, optax.adam(1e-3), batches)


def summarise(run: Run[OverlapSettings]) -> Result | None:
    """Compute the median round over its critical path; None before the first round."""
    settings, rounds = run.settings, run.records("round")
    if not rounds:
        return None
    wait_s, median_s = 2 * NUM_LAYERS * settings.delay_s, median(each["wall_s"] for each in rounds)
    figures = {
        "trainers": settings.trainers,
        "delay_s": settings.delay_s,
        "rounds": len(rounds),
        "critical_path_s": wait_s,
        "median_wall_s": median_s,
        "overlap_ratio": median_s / wait_s,
        "failed_calls": sum(each["failed_calls"] for each in rounds),
    }
    return Result(title="Overlap of asynchronous trainers", figures=figures, bars=[BAR])


EXPERIMENT = Experiment(measure=measure, summarise=summarise, expected=(NetError, FloatingPointError))
