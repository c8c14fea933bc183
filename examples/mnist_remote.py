"""MNIST: a trunk and experts of one's own, Linen and NNX, on two node processes; one of them is killed half way."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from dmoe_jax import Model, Outcome, connect, expert_from_linen, expert_from_nnx, load_mnist, product_key, score

WIDTH, BATCH, STEPS, ROUTER = 128, 128, 1600, product_key((2, 2))
OPTIMIZER = optax.adam(optax.cosine_decay_schedule(1.5e-3, STEPS))  # of the trunk, and of each expert by itself


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
EXPERTS = {"linen": expert_from_linen(LinenExpert(), ROW), "nnx": expert_from_nnx(NnxExpert, ROW)}
GATE, EMBED, HEAD = partial(score, ROUTER), nn.Dense(WIDTH), nn.Dense(10)  # the trunk: made once, jitted by `run`


class Classifier(Model):
    def __init__(self, swarm):
        self.mixtures = [swarm.mixture(kind, expert, ROUTER, k_best=2).remote for kind, expert in EXPERTS.items()]

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


if len(sys.argv) > 1:  # a node process: python mnist_remote.py PEER ROW
    with connect(sys.argv[1]) as swarm:
        mine = {f"{kind}.{sys.argv[2]}.[0:2]": expert for kind, expert in EXPERTS.items()}
        swarm.serve(mine, optimizer=OPTIMIZER, warm_up_rows=BATCH)
        print("serving", flush=True)
        sys.exit(sys.stdin.read())  # serve until our parent is gone

with connect() as swarm:
    nodes = [subprocess.Popen([sys.executable, __file__, swarm.contact, row], stdin=-1, stdout=-1) for row in "01"]
    assert all(node.stdout.readline() for node in nodes)
    train, test = load_mnist()
    drawn = (np.random.default_rng(step).integers(60_000, size=BATCH) for step in range(STEPS))
    batches = ((train.pixels[rows] / np.float32(255), train.labels[rows]) for rows in drawn)
    trainers = swarm.trainer(Classifier(swarm), OPTIMIZER, [batches] * 2)  # two trainers read one stream
    trainers.run(STEPS // 2)
    nodes[0].kill()
    trainers.run(STEPS // 2)
    parts = zip(np.split(test.pixels / np.float32(255), 100), np.split(test.labels, 100), strict=True)
    print(f"accuracy {trainers.evaluate(parts).metrics['accuracy']:.4f}, failed calls {swarm.statistics.failures}")
