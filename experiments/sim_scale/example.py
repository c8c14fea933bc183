"""A swarm in two regions to which everything happens, simulated: `python -m experiments.sim_scale.example [SEED]`.

Four trainers train a small Transformer-XL with experts on four nodes, over lines that lose parts. The ocean is cut from
20 to 30 s, and a node is down from 40 to 50 s; experts refuse, hang, die, answer garbage, late or in a wrong shape.
Each step is a line with its virtual time and its loss to the last bit: one seed gives one output.
"""

import json
import sys
from dataclasses import asdict

import jax
import numpy as np
import optax
import trio

from dmoe_jax import Trainer, open_swarm, product_key
from dmoe_jax.data import SegmentStream
from dmoe_jax.machine.device import CostModel, InlineDevice
from dmoe_jax.models import LayerConfig, TransformerXL, TransformerXLConfig, transformer_xl
from dmoe_jax.trunk import SharedTrunk
from dmoe_net import Address, Fault, FaultPlan
from dmoe_net.transport.sim import Heal, HostDown, HostOptions, HostUp, LogNormal, Partition, SimNetwork, run, simulate
from dmoe_net.transport.sim.links import RegionMatrix
from experiments.sim_scale.trainers import make_experts
from experiments.simulated_swarm import start_simulated_nodes

NUM_TRAINERS, NUM_NODES, END_S = 4, 4, 60.0
CONFIG = TransformerXLConfig(
    vocab_size=100,
    num_layers=1,
    grid_size=(2, 4),
    k_best=2,
    layer=LayerConfig(d_model=8, num_heads=2, d_ff=16, seq_len=8, mem_len=8),
)
ROUTER = product_key(CONFIG.grid_size)
LATENCY = RegionMatrix(
    region_of={f"{what}{n}": ("europe", "america")[n % 2] for what in ("node", "trainer") for n in range(4)},
    models={
        ("europe", "europe"): LogNormal(median_s=0.01, sigma=0.5),
        ("america", "america"): LogNormal(median_s=0.02, sigma=0.5),
        ("europe", "america"): LogNormal(median_s=0.06, sigma=0.3, floor_s=0.04),
    },
)
SCHEDULE = (
    (20.0, Partition(groups=(frozenset({"node1", "node3", "trainer1", "trainer3"}),))),  # the others form one more
    (30.0, Heal()),
    (40.0, HostDown("node1")),
    (50.0, HostUp("node1")),
)
FAULTS = {
    Fault.REFUSE: 0.02,
    Fault.HANG: 0.01,
    Fault.DIE: 0.01,
    Fault.GARBAGE: 0.01,
    Fault.LATE: 0.1,
    Fault.WRONG_SHAPE: 0.02,
}


def say(kind: str, **fields: object) -> None:
    """Print a record, with its virtual time."""
    print(json.dumps({"kind": kind, "virtual_s": trio.current_time(), **fields}))


async def swarm(seed: int) -> None:
    """Train until the end of the time."""
    params = transformer_xl.init_trunk(jax.random.key(seed), CONFIG, ROUTER)
    trunk = SharedTrunk(params, optax.adam(1e-3), InlineDevice())
    text = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, 2000)

    async def train(network: SimNetwork, index: int, join: Address) -> None:
        device = InlineDevice(CostModel(call_s=0.06, slowdown=1.0 + index % 2))  # half as fast in America
        host = f"trainer{index}"
        async with open_swarm(join, network=network, host=host, listen=None, seed=seed, device=device) as swarm:
            mixture = swarm.mixture("layer0", CONFIG.expert(), ROUTER, k_best=2, grace_s=0.3, timeout_s=3.0)
            stream = SegmentStream(
                text, batch_size=2, seq_len=CONFIG.seq_len, shard=index, num_shards=NUM_TRAINERS, seed=seed
            )
            await Trainer(index, TransformerXL(CONFIG, ROUTER, [mixture]), trunk, stream).run(
                1_000_000,  # until the time is over
                lambda record: say("step", **asdict(record)),
                lambda trainer, error: say("lost", trainer=trainer, error=type(error).__name__),
            )

    lines = HostOptions(up_bps=20e6, down_bps=100e6)
    async with simulate(seed=seed, latency=LATENCY, hosts=lines, loss=0.01, schedule=SCHEDULE) as network:
        join = await start_simulated_nodes(
            network,
            make_experts(CONFIG, seed=seed),
            num_nodes=NUM_NODES,
            seed=seed,
            device=lambda host: InlineDevice(CostModel(call_s=0.03, row_s=0.005)),
            faults=FaultPlan(rates=FAULTS, late_mean_s=0.5, methods=("expert.",), seed=seed),
        )
        for index in range(NUM_TRAINERS):
            network.start(f"trainer{index}", train, network, index, join)
        await trio.sleep_until(END_S)
        say("network", **asdict(network.statistics()))


if __name__ == "__main__":
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    run(swarm, seed, seed=seed)
