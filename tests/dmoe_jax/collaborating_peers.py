"""Peers that make one large batch together, in the simulated swarm of the tests of averaging."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import trio

from dmoe_jax.collaboration import Collaboration, CollaborationConfig, GlobalStep, open_collaboration
from dmoe_jax.device import InlineDevice
from dmoe_jax.optim.collaborative import Collaborative, collaborative
from tests.net.averaging_swarm import Swarm, open_place

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), "b": jnp.zeros(4)}
CONFIG = CollaborationConfig(target_batch_size=256, lead_s=2.0)


def loss(params: Any, x: Any, y: Any) -> Any:
    """A small regression."""
    return jnp.mean(jnp.sum((jnp.tanh(x @ params["w"]) + params["b"] - y) ** 2, -1))


gradient = jax.jit(jax.grad(loss))


def samples_of(name: str, number: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Micro-batch `number` of a peer: x [count, 3], y [count, 4]."""
    rng = np.random.default_rng([number, *name.encode()])
    x = rng.normal(size=(count, 3)).astype(np.float32)
    return x, np.sin(2 * x @ np.arange(12).reshape(3, 4)).astype(np.float32)


@dataclass(slots=True, eq=False)
class PeerLog:
    """What a peer did, kept beyond its end."""

    peer: Collaboration | None = None
    steps: list[GlobalStep] = field(default_factory=list)
    params: dict[int, Any] = field(default_factory=dict)
    """Step -> parameters after it."""
    chains: dict[int, bytes] = field(default_factory=dict)
    """Step -> chain after it."""
    batches: dict[int, list[int]] = field(default_factory=dict)
    """Step (from 0) -> micro-batches that were gathered for it."""

    @property
    def stepped(self) -> set[int]:
        """Steps that it made itself."""
        return {each.number for each in self.steps}


@dataclass(slots=True, eq=False)
class Worker:
    """A peer that computes micro-batches of `count` samples, each in `seconds`."""

    name: str
    seconds: float
    count: int = 4
    log: PeerLog = field(default_factory=PeerLog)

    def gathered(self, number: int) -> int:
        """Samples that it gathered for step `number`, from 1."""
        return self.count * len(self.log.batches.get(number - 1, []))

    async def live(self, peer: Collaboration) -> None:
        """Train for ever."""
        self.log.peer = peer
        number = 0
        while True:
            step = peer.step
            x, y = samples_of(self.name, number, self.count)
            grads = gradient(peer.params, x, y)
            await trio.sleep(self.seconds)
            self.log.batches.setdefault(step, []).append(number)
            number += 1
            await peer.add(grads, samples=self.count, took_s=self.seconds)
            self.log.params[peer.step] = jax.tree.map(np.array, peer.params)
            self.log.chains[peer.step] = peer.chain


async def until(condition: Callable[[], bool]) -> None:
    """Wait, in virtual time, for something that has no event."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.01)


def optimizer() -> Collaborative:
    """Adam with a schedule, so that a wrong count of steps shows."""
    return collaborative(optax.adam(optax.linear_schedule(0.05, 0.01, 20)))


def start(
    swarm: Swarm,
    worker: Worker,
    *,
    config: CollaborationConfig = CONFIG,
    together: Callable[[], Collaborative] = optimizer,
    client: bool = False,
    params: Any = PARAMS,
) -> None:
    """Start a peer on the host of its name."""

    async def main() -> None:
        async with (
            open_place(swarm, worker.name, client_mode=client) as place,
            open_collaboration(
                place.rpc,
                place.dht,
                params,
                together=together(),
                name="run",
                config=config,
                device=InlineDevice(),
                rng=place.rng,
                on_step=worker.log.steps.append,
            ) as peer,
        ):
            await worker.live(peer)

    swarm.network.start(worker.name, main)


def check_one_machine(workers: list[Worker], survivors: list[Worker] | None = None) -> int:
    """Compare the survivors' parameters after each step with those of one process with the same samples in one batch.

    A step holds what its members gathered for it. Of one that died in it that is told by the number of samples.

    Returns: how many steps there were.
    """
    inner = optax.adam(optax.linear_schedule(0.05, 0.01, 20))
    params, state = PARAMS, inner.init(PARAMS)
    survivors = workers if survivors is None else survivors
    whole = {each.number: round(each.samples) for worker in survivors for each in worker.log.steps}
    for number in range(1, max(whole) + 1):
        sure = [worker for worker in workers if number in worker.log.stepped]
        others = [worker for worker in workers if worker not in sure and worker.gathered(number)]
        gathered = {worker.name: worker.gathered(number) for worker in (*sure, *others)}
        there = next(
            (
                [*sure, *some]
                for count in range(len(others) + 1)
                for some in itertools.combinations(others, count)
                if sum(gathered[worker.name] for worker in (*sure, *some)) == whole[number]
            ),
            None,
        )
        assert there is not None, f"step {number} has {whole[number]} samples, not of {gathered}"
        micro_batches = [
            samples_of(worker.name, each, worker.count) for worker in there for each in worker.log.batches[number - 1]
        ]
        x, y = (np.concatenate(each) for each in zip(*micro_batches, strict=True))
        updates, state = inner.update(gradient(params, x, y), state, params)
        params = optax.apply_updates(params, updates)
        for worker in workers:
            if number in worker.log.params:
                assert largest_difference(worker.log.params[number], params) <= 1e-5, (worker.name, number)
        assert len({worker.log.chains[number] for worker in workers if number in worker.log.chains}) == 1
    return max(whole)


def largest_difference(a: Any, b: Any) -> float:
    """Largest difference relative to the largest parameter."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(b))
    return max(float(np.abs(np.asarray(one) - np.asarray(other)).max()) for one, other in pairs) / scale
