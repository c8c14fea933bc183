"""A swarm to which everything happens, written down: is it the same the second time?

    python -m experiments.sim_scale.scenario --seed 1 --out metrics.jsonl

Eight trainers train a small Transformer-XL with experts on six nodes, over slow lines that lose parts, while a node
crashes and comes back, the network falls apart and heals, a peer becomes slow, and experts refuse, hang, die, answer
garbage, late or in a wrong shape. Every step goes into the metrics with its virtual time and its loss to the last bit.
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
import trio

from dmoe_jax import open_swarm
from dmoe_jax.data.batches import SegmentStream
from dmoe_jax.directory.grid import layer_prefix
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.machine.device import CostModel, InlineDevice
from dmoe_jax.mixture.statistics import CallStatistics
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.peers.peer import Seams
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.endings import fail
from dmoe_jax.runs.run_folder import append_metric
from dmoe_jax.trainer import StepRecord, Trainer
from dmoe_jax.trunk import SharedTrunk
from dmoe_net.rpc.faults import Fault, FaultPlan
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.events import Heal, HostDown, HostUp, Partition, SetHost
from dmoe_net.transport.sim.links import HostOptions, LogNormal
from dmoe_net.wire.compression import Compression
from experiments.sim_scale.trainers import make_experts
from experiments.simulated_swarm import start_simulated_nodes

NUM_NODES = 6
NUM_TRAINERS = 8

FAULTS = {
    Fault.REFUSE: 0.02,
    Fault.HANG: 0.01,
    Fault.DIE: 0.01,
    Fault.GARBAGE: 0.01,
    Fault.LATE: 0.1,
    Fault.WRONG_SHAPE: 0.02,
}

SCHEDULE = (
    (4.0, SetHost("node1", HostOptions(up_bps=2e6, down_bps=2e6, extra_latency_s=0.2))),
    (6.0, HostDown("node2")),
    (9.0, Partition(groups=(frozenset({"node3", "trainer0", "trainer1"}),))),
    (14.0, Heal()),
    (16.0, HostUp("node2")),
    (18.0, HostDown("node4", silent=True)),
)

CONFIG = TransformerXLConfig(
    vocab_size=200,
    num_layers=2,
    grid_size=(4, 4),
    k_best=2,
    layer=LayerConfig(d_model=16, num_heads=2, d_ff=32, seq_len=8, mem_len=8),
)


@dataclass(frozen=True, kw_only=True)
class ScenarioSettings:
    """Simulate a small swarm with all kinds of trouble and write its metrics."""

    out: Path
    """The metrics file."""
    seed: int = 0
    """Seed of parameters, text, latencies, losses, faults and scheduling."""
    steps: int = 48
    """Steps of all trainers together."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.seed < 0:
            raise ValueError(f"expected steps >= 1 and seed >= 0, got {self.steps} and {self.seed}")


async def _simulate(settings: ScenarioSettings) -> None:
    seed, log = settings.seed, partial(append_metric, settings.out)
    router = product_key(CONFIG.grid_size)
    params = txl.init_trunk(jax.random.key(seed), CONFIG, router)
    trunk = SharedTrunk(params, optax.adam(1e-3), InlineDevice(CostModel(call_s=0.02)))
    text = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, 5000)
    shards = partial(SegmentStream, text, batch_size=2, seq_len=CONFIG.layer.seq_len, num_shards=NUM_TRAINERS)
    statistics = CallStatistics()

    def on_step(record: StepRecord) -> None:
        log(kind="step", virtual_s=trio.current_time(), **asdict(record))

    def on_lost(trainer: int, error: Exception) -> None:
        fields = {"trainer": trainer, "error": type(error).__name__, "detail": str(error)}
        log(kind="lost", virtual_s=trio.current_time(), **fields)

    async def train(index: int) -> None:
        """A trainer, in a process of its own but for the trunk."""
        device = InlineDevice(CostModel(call_s=0.005, slowdown=1.0 + index % 3))
        compression = list(Compression)[index % len(Compression)]
        host = f"trainer{index}"
        async with open_swarm(
            join,
            network=network,
            host=host,
            listen=None,
            seed=seed,
            device=device,
            testing=Seams(statistics=statistics),
        ) as swarm:
            mixture = partial(swarm.mixture, k_best=CONFIG.k_best, grace_s=0.5, timeout_s=4.0, compression=compression)
            layers = [mixture(layer_prefix(layer), CONFIG.expert(), router) for layer in range(CONFIG.num_layers)]
            trainer = Trainer(index, txl.TransformerXL(CONFIG, router, layers), trunk, shards(shard=index, seed=seed))
            await trainer.run(settings.steps, on_step, on_lost)

    async with simulate(
        seed=seed,
        latency=LogNormal(median_s=0.06, sigma=0.6, floor_s=0.01),
        hosts=HostOptions(up_bps=20e6, down_bps=100e6),
        loss=0.01,
        schedule=SCHEDULE,
        give_up_s=20.0,
    ) as network:
        join = await start_simulated_nodes(
            network,
            make_experts(CONFIG, seed=seed),
            num_nodes=NUM_NODES,
            seed=seed,
            device=lambda _: InlineDevice(CostModel(call_s=0.004, row_s=0.001)),
            faults=FaultPlan(rates=FAULTS, late_mean_s=0.5, methods=("expert.",), seed=seed),
            config=NodeConfig(announce_period_s=3.0, record_lifetime_s=9.0),
        )
        async with trio.open_nursery() as nursery:
            for index in range(NUM_TRAINERS):
                nursery.start_soon(train, index)
        log(kind="network", **asdict(network.statistics()))
    totals = asdict(statistics)
    del totals["host"]
    log(kind="calls", virtual_s=trio.current_time(), **totals)


def main() -> None:
    """Run the scenario from the beginning; the metrics file gets a line for each step, lost step and total."""
    settings = parse_command_line(ScenarioSettings, prog="python -m experiments.sim_scale.scenario", args=None)
    try:
        settings.out.write_text("")
    except OSError as error:
        fail(f"cannot write {settings.out}: {error.strerror}", prog="scenario")
    run(_simulate, settings, seed=settings.seed)


if __name__ == "__main__":
    main()
