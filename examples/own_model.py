"""A model, experts and an optimiser of one's own: for `mnist_remote.py`, and for `dmoe node` and `dmoe train`.

dmoe node --experts 'linen.[0:2].[0:2]' --expert own_model.py:linen_expert --optimizer own_model.py:optimizer
dmoe node --join PEER --experts 'nnx.[0:2].[0:2]' --expert own_model.py:nnx_expert --optimizer own_model.py:optimizer
dmoe train --join PEER --model own_model.py:Classifier --optimizer own_model.py:optimizer --steps 1600
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from dmoe_jax import Model, Outcome, expert_from_linen, expert_from_nnx, load_mnist, product_key, score

WIDTH, BATCH, STEPS, ROUTER = 128, 128, 1600, product_key((2, 2))
optimizer = optax.adam(optax.cosine_decay_schedule(1.5e-3, STEPS))  # of the trunk, and of each expert by itself
images = cache(load_mnist)


class LinenExpert(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))


class NnxExpert(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(WIDTH, 256, rngs=rngs), nnx.Linear(256, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.outer(nnx.gelu(self.inner(x)))


ROW = jnp.zeros((1, WIDTH))  # an example input
linen_expert, nnx_expert = expert_from_linen(LinenExpert(), ROW), expert_from_nnx(NnxExpert, ROW)
EXPERTS = {"linen": linen_expert, "nnx": nnx_expert}  # a layer of each, by the prefix of its experts
GATE, EMBED, HEAD = partial(score, ROUTER), nn.Dense(WIDTH), nn.Dense(10)  # the trunk: made once, jitted by `run`


class Classifier(Model):
    def __init__(self, swarm):
        self.mixtures = [swarm.mixture(kind, expert, ROUTER, k_best=2) for kind, expert in EXPERTS.items()]

    def init(self, key):
        a, b, c, d = jax.random.split(key, 4)
        gates = [ROUTER.init(a, WIDTH), ROUTER.init(b, WIDTH)]
        return {"embed": EMBED.init(c, jnp.zeros((1, 784))), "gates": gates, "head": HEAD.init(d, ROW)}

    async def forward(self, run, params, batch, state, keys):
        hidden = run(EMBED.apply, params["embed"], batch[0])
        for gate, mixture in zip(params["gates"], self.mixtures, strict=True):
            hidden, _ = await mixture(run, run(GATE, gate, hidden), hidden)
        loss, accuracy = run(self.head, params["head"], hidden, batch[1])
        return Outcome(loss=loss, items=len(batch[1]), metrics={"accuracy": accuracy})

    @staticmethod
    def head(params, hidden, labels):
        logits = HEAD.apply(params, hidden)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits.argmax(-1) == labels).mean()

    def batches(self, shard, num_shards, seed):  # of one of the trainers
        train, rng = images().train, np.random.default_rng((seed, shard))
        while True:
            rows = rng.integers(len(train.labels), size=BATCH)
            yield train.pixels[rows] / np.float32(255), train.labels[rows]

    def validation(self):
        pixels, labels = images().test
        return zip(np.split(pixels / np.float32(255), 100), np.split(labels, 100), strict=True)
