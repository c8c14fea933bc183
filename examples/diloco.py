"""DiLoCo over the network: two processes with data of their own, an ordinary jitted loop, and two lines of averaging.

python examples/diloco.py                  # starts a second process of itself
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from dmoe_jax import TreeAveragerConfig, connect, moshpit_average

STEPS, EVERY = 400, 20
MODEL = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(1)])
OPTIMIZER = moshpit_average(optax.adamw(3e-3), every=EVERY, what="pseudo_gradients")  # outer: Nesterov, as in the paper


def sample(rng, low, high):
    """A sine over a part of the line: no process sees all of it."""
    x = rng.uniform(low, high, size=(64, 1)).astype(np.float32)
    return x, np.sin(3 * x)


def loss_of(params, x, y):
    return jnp.mean((MODEL.apply(params, x) - y) ** 2)


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train(swarm, index):
    rng, (low, high) = np.random.default_rng(index), [(-1.0, 0.1), (-0.1, 1.0)][index]
    params = MODEL.init(jax.random.key(0), jnp.zeros((1, 1)))
    opt_state = OPTIMIZER.init(params)
    config = TreeAveragerConfig(side=2, window_s=3.0)
    with swarm.averager(params, OPTIMIZER, name="sine", config=config) as averager:
        for _ in range(STEPS):
            params, opt_state, _ = train_step(params, opt_state, *sample(rng, low, high))
            # Without `wait` training goes on meanwhile. A process that joins late gets the others' state here.
            opt_state = averager.step(opt_state, params, wait=True)
        x, y = sample(rng, -1.0, 1.0)
        done, missed = averager.totals.done, averager.totals.missed
        loss = loss_of(params, x, y)
        print(f"process {index}: loss over the whole line {loss:.5f}, {done} averages, {missed} missed")


with connect(sys.argv[1:2]) as swarm:
    if len(sys.argv) == 1:
        other = subprocess.Popen([sys.executable, __file__, swarm.contact])
        train(swarm, 0)
        sys.exit(other.wait())
    train(swarm, 1)
