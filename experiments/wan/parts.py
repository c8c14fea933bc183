"""The parts in virtual time, on a simulated network whose hosts have lines of given bandwidth and round trip.

`allreduce` and `state`: the shares of a line that all-reduces and downloads of a state use. `churn` and `kill`, scenes
of `experiments.collaborative` on lines of 10 Mb/s with a vector of half a MiB: how much of what peers compute ends in a
step, and how long the next step takes.

`tokens`: how many bytes cross the lines for each token that is trained, as the network counts them. Eight machines
compute 512 tokens a second each. With *gradients* every step of the optimiser is one of all machines together. With
*pseudo-gradients* (DiLoCo) and *parameters* (Moshpit averaging as `dmoe train --average-every` does it) each machine
takes steps of its own, with its eighth of the batch, and they meet every so many of these. With *sparse
pseudo-gradients* (SparseLoCo, `dmoe train --average-compression top-k`) only the largest of them travel.
"""

import itertools
import math
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import trio

from dmoe_jax import TreeAveragerConfig, moshpit_average
from dmoe_jax.averaging import Round, open_tree_averager
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.optim import ErrorFeedback, collaborative
from dmoe_jax.peers.peer import SIM_PORT, PeerConfig, SwarmPeer, open_peer
from dmoe_net import (
    Address,
    Constant,
    HostOptions,
    SharedState,
    SimNetwork,
    StateSharingConfig,
    StateSource,
    run,
    simulate,
)
from dmoe_net.averaging.state.download import download_state
from dmoe_net.averaging.state.sharing import StateSharing
from dmoe_net.rpc.bulk import MemoryBudget
from experiments.bench import Run
from experiments.collaborative.all_reduces import WrongResult, all_reduce_times
from experiments.collaborative.scenes import CHURN, Played, churn_figures, kill_in_averaging, play, play_swarm, unequal
from experiments.collaborative.world import PeerSpec, Problem, World
from experiments.wan.settings import WanSettings

QUICK_LINES = ((1.0, 100.0), (10.0, 100.0))
"""Those with a bar: bandwidth of each host, in each direction, in Gb/s, and the round trip between every two in ms."""
LINES = tuple((gbps, round_trip_ms) for gbps in (0.1, 1.0, 10.0) for round_trip_ms in (10.0, 50.0, 100.0, 200.0))

PEERS, DONORS = 4, 4
"""Members of a group, and donors at once."""

NUM_GROWING = 2
"""All-reduces on each line in which windows and connections grow; they do not count."""

_TICK_S = 0.0002
"""Deliveries are rounded up to multiples of it: a fraction of what a part of half a MiB takes on the fastest line."""

RATES = (0, 1, 2, 4, 8)
"""Failures a minute among sixteen peers."""

ROUND_TRIPS_MS = (20.0, 100.0, 200.0, 400.0)

_AVERAGING_S = 0.35
"""Seconds of an averaging on the line alone, with six members: kills come within it, and within the votes after it."""

EVERY = {"gradients": 1, "pseudo-gradients": 50, "parameters": 10, "sparse pseudo-gradients": 50}
"""Steps between two averages: of DiLoCo (Douillard et al. 2023, the shortest of its ablation), and of `dmoe up`."""

NUM_PEERS, TOKENS_PER_S, BATCH = 8, 512, 2**15
"""Machines, tokens a second of each, and tokens of a step of the optimiser, of all machines together."""
MICRO_BATCHES = 4
"""Micro-batches of a machine for each step with gradients: the swarm finds the end of a batch by them."""
ROUND_TRIP_MS, BITS_PER_S = 100.0, 100e6
_SKIPPED, _COUNTED = 1, 2
"""Averages before counting begins, in which peers find each other, and those that count; of gradients eight."""


def ideal_s(gbps: float, round_trip_ms: float, *, mib: int) -> float:
    """The least seconds of an all-reduce: each of n members' lines carries 2 (n - 1) / n vectors each way, and there is
    a round trip from the first value to its mean."""
    return 2 * (PEERS - 1) / PEERS * 8 * mib * 2**20 / (1e9 * gbps) + round_trip_ms / 1000


def times_on(gbps: float, round_trip_ms: float, settings: WanSettings) -> tuple[list[float], int]:
    """Average again and again on this line, as of `all_reduce_times`."""
    line = HostOptions(up_bps=1e9 * gbps, down_bps=1e9 * gbps)
    return all_reduce_times(
        [PeerSpec(name=f"peer{index}", sample_s=0.0, line=line) for index in range(PEERS)],
        settings.mib * 2**18,
        rounds=NUM_GROWING + 4,
        budget_bytes=settings.budget_mib * 2**20,
        seed=settings.seed,
        latency=Constant(round_trip_ms / 2000),
        tick_s=_TICK_S,
    )


def measure_all_reduces(run: Run[WanSettings]) -> None:
    """Measure shares of each line, of the first all-reduce and of those that count."""
    settings = run.settings
    for gbps, round_trip_ms in QUICK_LINES if settings.quick else LINES:
        run.say(f"{settings.mib} MiB among {PEERS} peers at {gbps:g} Gb/s and {round_trip_ms:g} ms")
        seconds, peak_bytes = times_on(gbps, round_trip_ms, settings)
        shares = [ideal_s(gbps, round_trip_ms, mib=settings.mib) / each for each in seconds]
        line = f"{gbps:g}g_{round_trip_ms:g}ms"
        for name, label, values in (("wan", "", shares[NUM_GROWING:]), ("first", ", the first", shares[:1])):
            where = {"name": f"{name}_share_{line}", "line": f"{gbps:g} Gb/s{label}", "x": round_trip_ms}
            run.log("allreduce", **where, values=values, peak_mib=peak_bytes / 2**20)


def download_time(
    settings: WanSettings, *, donors: int, mib: int, up_gbps: float, down_gbps: float
) -> tuple[float, float]:
    """Let a newcomer download a state at a round trip of 100 ms.

    Args:
      donors: that have it, the very same. mib: its length.
      up_gbps: of each donor. down_gbps: of the newcomer.

    Returns: virtual seconds from its asking the DHT for donors to the whole state; the most MiB that it took out of its
      memory budget.

    Raises:
      WrongResult: it is another state.
    """
    seed, config, budget = settings.seed, StateSharingConfig(), MemoryBudget(settings.budget_mib * 2**20)
    # Bytes that do not repeat with any period near a piece's, so that no two pieces are alike.
    values = np.random.default_rng(seed).integers(0, 2**32, mib * 2**18, np.uint32).view(np.float32)
    state = SharedState(version=1, tensors=tuple(np.array_split(values, 16)), facts={"step": 1})

    async def snapshot() -> SharedState:
        return state

    def host(name: str) -> HostOptions:
        return HostOptions(down_bps=1e9 * down_gbps) if name == "new" else HostOptions(up_bps=1e9 * up_gbps)

    async def main() -> float:
        source = StateSource(lambda: state.version, snapshot)
        async with AsyncExitStack() as stack:
            simulated = simulate(seed=seed, latency=Constant(0.05), hosts=host, tick_s=_TICK_S)
            network = await stack.enter_async_context(simulated)
            nursery = await stack.enter_async_context(trio.open_nursery())

            async def opened(name: str, budget: MemoryBudget) -> SwarmPeer:
                join = [] if name == "donor0" else [Address("donor0", SIM_PORT)]
                place = PeerConfig(network=network, host=name, seed=seed, memory_budget=budget)
                return await stack.enter_async_context(open_peer(join, place))

            for index in range(donors):
                donor = await opened(f"donor{index}", MemoryBudget(budget.max_bytes))
                sharing = StateSharing(donor.rpc, donor.dht, prefix="wan", source=source, config=config)
                nursery.start_soon(sharing.run)
            await trio.sleep(2.0)  # until all are announced
            peer, began = await opened("new", budget), trio.current_time()
            found = await download_state(peer.rpc, peer.dht, prefix="wan", rng=peer.rng, config=config)
            seconds = trio.current_time() - began
            nursery.cancel_scope.cancel()
        pairs = zip(found.tensors, state.tensors, strict=True) if found is not None else ()
        if found is None or not all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in pairs):
            raise WrongResult("the state that was downloaded is not the donors'")
        return seconds

    return run(main, seed=seed), budget.peak_bytes / 2**20


def measure_downloads(run: Run[WanSettings]) -> None:
    """Measure a download from one fast donor; then from several slow ones, who have the newcomer's line together, over
    that from one of them."""
    settings, mib = run.settings, run.settings.mib
    run.say(f"a state of {4 * mib} MiB from a fast donor, then one of {2 * mib} MiB from a slow one and from {DONORS}")
    seconds, peak_mib = download_time(settings, donors=1, mib=4 * mib, up_gbps=10.0, down_gbps=1.0)
    share = 8 * 4 * mib * 2**20 / 1e9 / seconds
    run.log("state", name="state_share", values=[share], peak_mib=peak_mib)
    slow: dict[str, Any] = {"mib": 2 * mib, "up_gbps": 1.0 / DONORS, "down_gbps": 10.0}
    of_one_s, _ = download_time(settings, donors=1, **slow)
    of_several_s, peak_mib = download_time(settings, donors=DONORS, **slow)
    run.log("state", name="donors_gain", values=[of_one_s / of_several_s], peak_mib=peak_mib)


def vector_of(num_params: int, shared: Any = "gradients") -> Problem:
    """A problem of which only the size matters: float32 parameters whose gradient is always the same.

    Args:
      shared: what peers add up, see `collaborative`.
    """
    grads = {"w": np.full(num_params, 1e-3, np.float32)}
    return Problem(
        params={"w": jnp.zeros(num_params)},
        gradient=lambda params, peer, number, count: grads,
        batch_gradient=lambda params, micro_batches: grads,
        together=collaborative(optax.sgd(1e-3), shared=shared),
    )


def lines(round_trip_ms: float, bits_per_s: float = 10e6, problem: Problem | None = None) -> dict[str, Any]:
    """Arguments of `play` for such a line of every host, and what is trained; None: 2**17 parameters, with which an
    averaging takes a second."""
    hosts = HostOptions(up_bps=bits_per_s, down_bps=bits_per_s)
    return {"latency_s": round_trip_ms / 2000, "lines": hosts, "problem": problem or vector_of(2**17)}


def measure_churn(run: Run[WanSettings]) -> None:
    """Play the scene for each rate and seed."""
    settings, virtual_s = run.settings, 240 if run.settings.quick else 300
    seeds = range(settings.seed, settings.seed + (1 if settings.quick else settings.seeds))
    for per_minute, seed in itertools.product(RATES, seeds):
        every_s = 60 / per_minute if per_minute else math.inf
        how = {**CHURN, **lines(100.0)}
        figures = churn_figures(play_swarm(virtual_s=virtual_s, failure_every_s=every_s, seed=seed, **how))
        goodput = figures.pop("goodput")
        run.say(f"churn: {per_minute} failures a minute among 16 peers, seed {seed}: goodput {goodput:.3f}")
        name = f"churn_goodput_{per_minute}"
        run.log("churn", name=name, line="each seed", x=per_minute, values=[goodput], seed=seed, **figures)


def measure_kills(run: Run[WanSettings]) -> None:
    """Kill peers one after the other at each round trip: killed processes, and machines that are unplugged."""
    kills = 3 if run.settings.quick else 6
    for round_trip_ms in ROUND_TRIPS_MS:
        for how in ("kill", "unplug"):
            run.say(f"{how} {kills} peers while they average, {round_trip_ms:g} ms")
            silent, seed = how == "unplug", run.settings.seed
            played = play_kills(round_trip_ms=round_trip_ms, kills=kills, silent=silent, seed=seed)
            where = {"name": f"{how}_next_step_s", "line": how, "x": round_trip_ms, "values": played.recovered_s}
            run.log("kill", **where, chains_apart=played.chains_apart)


def play_kills(*, round_trip_ms: float, kills: int, silent: bool, seed: int) -> Played:
    """Six machines; one after the other dies, or is unplugged, in the middle of an averaging and comes back later."""
    specs, averaging_s = unequal(6, slowest_s=0.25), _AVERAGING_S + round_trip_ms / 1000

    async def body(world: World, played: Played) -> None:
        for spec in specs:
            world.start(spec)
        await world.wait_for_step(2)
        for number in range(kills):
            name, after_s = specs[number % len(specs)].name, (number + 0.5) / kills * averaging_s
            await kill_in_averaging(world, played, name, after_s=after_s, silent=silent)
            await trio.sleep(20)
            world.revive(name)
            await world.wait_for_step(world.step + 3)

    return play(body, target=384, seed=seed, **lines(round_trip_ms))


def measure_tokens(run_: Run[WanSettings]) -> None:
    """Count for each method and size of the model."""
    sizes = (2**18, 2**20) if run_.settings.quick else (2**18, 2**20, 2**22)
    for num_params, method in itertools.product(sizes, EVERY):
        run_.say(f"tokens: {num_params:,} parameters, {BATCH:,} tokens a step, {method}")
        nbytes, tokens = traffic_of(method, num_params=num_params, batch=BATCH, seed=run_.settings.seed)
        name = f"bytes_per_token_{method.replace('-', '_').replace(' ', '_')}_{num_params}"
        run_.log("tokens", name=name, line=method, x=num_params, values=[nbytes / tokens], nbytes=nbytes)


def traffic_of(method: str, *, num_params: int, batch: int, seed: int) -> tuple[float, float]:
    """Let eight machines train, and count from one average to a later one; `batch` is of all together, in tokens.

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
