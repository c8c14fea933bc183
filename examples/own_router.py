"""A routing function of one's own, compared with product keys on the same swarm, data and seeds.

The file also works where a router is asked for by name:  dmoe train --router examples/own_router.py:two_headed ...
"""

from functools import partial
from itertools import islice

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from dmoe_jax import connect
from dmoe_jax.models.mlp import MLP, Batch, MLPConfig
from dmoe_jax.routing import add_noise, chain_routers, product_key, router_from_linen, with_balancing_loss

CONFIG = MLPConfig(input_dim=16, num_classes=4, d_model=16, num_layers=1, grid_size=(2, 4), k_best=2)


class TwoHeads(nn.Module):
    """Scores for rows and columns of the grid from two small networks."""

    grid_size: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        return tuple(nn.Dense(extent)(nn.tanh(nn.Dense(32)(x))) for extent in self.grid_size)


def two_headed(grid_size):
    """The network's scores, with noise in training and a loss against uneven load."""
    network = router_from_linen(lambda: TwoHeads(grid_size), grid_size, name="two_headed")
    return chain_routers(network, partial(add_noise, stddev=0.3), with_balancing_loss)


def batches(seed):
    """Four clouds of points, each in two places."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(8, CONFIG.input_dim)) * 1.5
    while True:
        place = rng.integers(8, size=32)
        x = centres[place] + rng.normal(size=(32, CONFIG.input_dim))
        yield Batch(jnp.asarray(x, jnp.float32), jnp.asarray(place % 4, jnp.int32))


def main():
    with connect(seed=0) as swarm:
        for router in (product_key(CONFIG.grid_size), two_headed(CONFIG.grid_size)):
            prefix = router.name.replace("+", "_")
            served = swarm.serve({f"{prefix}.[0:2].[0:4]": CONFIG.expert()}, optimizer=optax.adam(1e-3))
            mixture = swarm.mixture(prefix, CONFIG.expert(), router, k_best=CONFIG.k_best).remote
            trainers = swarm.trainer(MLP(CONFIG, router, [mixture]), optax.adam(3e-3), batches(1))
            trainers.run(50)
            found = trainers.evaluate(islice(batches(2), 8))
            load = sorted((swarm.statistics.load.get(uid, 0) for uid in served.uids), reverse=True)
            print(f"{router.name}: loss {found.loss:.3f}, accuracy {found.metrics['accuracy']:.3f}, load {load}")
            served.close()


if __name__ == "__main__":
    main()
