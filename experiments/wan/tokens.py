"""Part `tokens`: how many bytes cross the lines for each token that is trained, as the simulated network counts them.

Eight machines compute 512 tokens a second each. With *gradients* every step of the optimiser is one of all machines
together. With *pseudo-gradients* (DiLoCo) and *parameters* (Moshpit averaging as `dmoe train --average-every` does it)
each machine takes steps of its own, with its eighth of the batch, and they meet every so many of these. With *sparse
pseudo-gradients* (SparseLoCo, `dmoe train --average-compression top-k`) only the largest of them travel.
"""

import itertools
import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import trio

from dmoe_jax import TreeAveragerConfig, moshpit_average
from dmoe_jax.averaging import Round, open_tree_averager
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.optim import ErrorFeedback
from dmoe_jax.peers.peer import SIM_PORT, PeerConfig, open_peer
from dmoe_net import Address, Constant, HostOptions, SimNetwork, run, simulate
from experiments.bench import Run
from experiments.collaborative.scenes import Played, play
from experiments.collaborative.world import PeerSpec, World
from experiments.wan.failures import lines, vector_of
from experiments.wan.settings import WanSettings

EVERY = {"gradients": 1, "pseudo-gradients": 50, "parameters": 10, "sparse pseudo-gradients": 50}
"""Steps between two averages: of DiLoCo (Douillard et al. 2023, the shortest of its ablation), and of `dmoe up`."""

NUM_PEERS, TOKENS_PER_S, BATCH = 8, 512, 2**15
"""Machines, tokens a second of each, and tokens of a step of the optimiser, of all machines together."""
MICRO_BATCHES = 4
"""Micro-batches of a machine for each step with gradients: the swarm finds the end of a batch by them."""
ROUND_TRIP_MS, BITS_PER_S = 100.0, 100e6
_SKIPPED, _COUNTED = 1, 2
"""Averages before counting begins, in which peers find each other, and those that count; of gradients eight."""


def measure(run_: Run[WanSettings]) -> None:
    """Count for each method and size of the model."""
    sizes = (2**18, 2**20) if run_.settings.quick else (2**18, 2**20, 2**22)
    for num_params, method in itertools.product(sizes, EVERY):
        run_.say(f"tokens: {num_params:,} parameters, {BATCH:,} tokens a step, {method}")
        nbytes, tokens = traffic_of(method, num_params=num_params, batch=BATCH, seed=run_.settings.seed)
        name = f"bytes_per_token_{method.replace('-', '_').replace(' ', '_')}_{num_params}"
        run_.log("tokens", name=name, line=method, x=num_params, values=[nbytes / tokens], nbytes=nbytes)


def traffic_of(method: str, *, num_params: int, batch: int, seed: int) -> tuple[float, float]:
    """Let eight machines train, and count from one average to a later one.

    Args:
      method: what they average.
      num_params: of the model, float32.
      batch: tokens of a step of the optimiser, of all machines together.

    Returns: bytes that were delivered to all hosts together, frames with their headers, whatever they are for; tokens
      that all machines trained meanwhile.
    """
    count = _in_collaboration if method in ("gradients", "pseudo-gradients") else _in_averaging
    return count(method, num_params, batch, seed)


def _in_collaboration(method: str, num_params: int, batch: int, seed: int) -> tuple[float, float]:
    is_every_step = method == "gradients"
    micro_batch = batch // NUM_PEERS // (MICRO_BATCHES if is_every_step else 1)
    found: list[tuple[float, float]] = []

    async def body(world: World, played: Played) -> None:
        for index in range(NUM_PEERS):
            world.start(PeerSpec(name=f"peer{index}", sample_s=1 / TOKENS_PER_S, micro_batch=micro_batch))
        await world.wait_for_step(_SKIPPED)
        first, nbytes = world.step, world.network.statistics().nbytes
        await world.wait_for_step(first + (8 if is_every_step else _COUNTED))
        played.lives = world.lives
        tokens = sum(samples for number, _, samples in played.steps() if number > first)
        found.append((world.network.statistics().nbytes - nbytes, tokens))

    problem = vector_of(num_params, "gradients" if is_every_step else "pseudo_gradients")
    play(body, target=batch * EVERY[method], seed=seed, **lines(ROUND_TRIP_MS, BITS_PER_S, problem))
    return found[0]


def _in_averaging(method: str, num_params: int, batch: int, seed: int) -> tuple[float, float]:
    how: dict[str, Any] = {"every": EVERY[method]}
    if method == "sparse pseudo-gradients":  # 64 values of each 4,096 in two bits: SparseLoCo's setting
        how |= {"what": "pseudo_gradients", "outer": optax.sgd(1.0), "compress": ErrorFeedback()}
    optimizer = moshpit_average(optax.sgd(1e-3), **how)
    update, grads = jax.jit(optimizer.update), {"w": jnp.full(num_params, 1e-3)}
    line = HostOptions(up_bps=BITS_PER_S, down_bps=BITS_PER_S)
    rounds = tokens = 0

    def note(done: Round) -> None:
        nonlocal rounds
        rounds += done.received > 0

    async def train(network: SimNetwork, index: int) -> None:
        nonlocal tokens
        params = {"w": jnp.zeros(num_params)}
        state = optimizer.init(params)
        joins = [Address("peer0", SIM_PORT)] if index else []
        async with (
            open_peer(joins, PeerConfig(network=network, host=f"peer{index}", seed=index)) as place,
            open_tree_averager(
                replace(place, rng=random.Random(index)),
                params,
                optimizer=optimizer,
                name="run",
                config=TreeAveragerConfig(side=NUM_PEERS),
                device=InlineDevice(),
                on_round=note,
            ) as averager,
        ):
            while True:
                await trio.sleep(batch / NUM_PEERS / TOKENS_PER_S)
                tokens += batch // NUM_PEERS
                updates, state = update(grads, state, params)
                params = optax.apply_updates(params, updates)
                state = await averager.step(state, params)

    async def main() -> tuple[float, float]:
        async with simulate(seed=seed, latency=Constant(ROUND_TRIP_MS / 2000), hosts=line) as network:
            for index in range(NUM_PEERS):
                network.start(f"peer{index}", train, network, index)
            counted = []
            for wanted in (_SKIPPED, _SKIPPED + _COUNTED):
                while rounds < NUM_PEERS * wanted:  # noqa: ASYNC110 (virtual time)
                    await trio.sleep(0.1)
                counted.append((network.statistics().nbytes, tokens))
            return counted[1][0] - counted[0][0], counted[1][1] - counted[0][1]

    return run(main, seed=seed)
