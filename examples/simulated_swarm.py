"""A swarm in virtual time: four nodes, two of which die, and eight trainers, on one simulated wide-area network.

The same seed gives the same run, to the last bit; the code is that of a real swarm.
"""

from itertools import islice

import numpy as np
import optax
import trio

from dmoe_jax import open_swarm, product_key
from dmoe_jax.models.mlp import MLP, Batch, MLPConfig
from dmoe_net import HostDown, LogNormal, run, simulate

CONFIG = MLPConfig(input_dim=8, num_classes=2, d_model=16, num_layers=1, grid_size=(4, 2), k_best=2)
ROUTER = product_key(CONFIG.grid_size)


def batches(seed):
    """Yield batches of a small task: tell which of two numbers is larger."""
    rng = np.random.default_rng(seed)
    while True:
        x = rng.normal(size=(16, CONFIG.input_dim)).astype(np.float32)
        yield Batch(x, (x[:, 0] > x[:, 1]).astype(np.int32))


async def node(network, index, join, started):
    """A host that serves one row of each layer's grid."""
    async with open_swarm(join, network=network, host=f"node{index}", seed=index) as swarm:
        experts = {f"layer{layer}.{index}.[0:2]": CONFIG.expert() for layer in range(CONFIG.num_layers)}
        await swarm.serve(experts, optimizer=optax.adam(3e-3))
        started.set()
        await trio.sleep_forever()


async def main():
    deaths = [(15.0, HostDown("node2")), (17.0, HostDown("node3"))]
    async with (
        simulate(seed=1, latency=LogNormal(median_s=0.08, sigma=0.5), schedule=deaths) as network,
        open_swarm(network=network, host="trainer", seed=7) as swarm,
    ):
        for index in range(4):
            started = trio.Event()
            network.start(f"node{index}", node, network, index, swarm.contact, started)
            await started.wait()
        model = MLP.on(swarm, CONFIG, ROUTER)
        trainers = swarm.trainer(model, optax.adam(5e-3), [batches(seed) for seed in range(8)])
        losses = []
        for _ in range(4):
            await trainers.run(30)
            evaluation = await trainers.evaluate(islice(batches(99), 8))
            losses.append(evaluation.loss)
            print(
                f"{trio.current_time():7.1f} virtual s, step {trainers.step}: loss {evaluation.loss:.4f}, "
                f"accuracy {evaluation.metrics['accuracy']:.2f}, failed calls {dict(swarm.statistics.failures)}"
            )
        return losses


print(run(main, seed=1))
