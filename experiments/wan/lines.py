"""Parts `allreduce` and `state`: the shares of a line that all-reduces and downloads of a state use."""

import random
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import trio

from dmoe_jax.peers.peer import SIM_PORT, PeerConfig, SwarmPeer, open_peer
from dmoe_net import (
    Address,
    AllReduceConfig,
    Constant,
    HostOptions,
    PeerId,
    SharedState,
    StateSharingConfig,
    StateSource,
    open_rpc_peer,
    run,
    simulate,
)
from dmoe_net.averaging.grouping.group import GROUP_ID_BYTES, Group, Member
from dmoe_net.averaging.reduction.all_reduce import AllReduce
from dmoe_net.averaging.state.download import download_state
from dmoe_net.averaging.state.sharing import StateSharing
from dmoe_net.rpc.bulk import MemoryBudget
from experiments.bench import Run
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


class WrongResult(Exception):
    """An average is not the mean of all vectors, or a state not that of its donors."""


def ideal_s(gbps: float, round_trip_ms: float, *, mib: int) -> float:
    """The least seconds of an all-reduce: each of n members' lines carries 2 (n - 1) / n vectors each way, and there is
    a round trip from the first value to its mean."""
    return 2 * (PEERS - 1) / PEERS * 8 * mib * 2**20 / (1e9 * gbps) + round_trip_ms / 1000


def all_reduce_times(gbps: float, round_trip_ms: float, settings: WanSettings) -> tuple[list[float], float]:
    """Average again and again among members that are each on a host with that line.

    Returns: the virtual seconds of each all-reduce, from the first member's start to the last one's end; the most MiB
      that any member took out of its memory budget.

    Raises:
      WrongResult: an average is not the mean.
    """
    rng, budgets = random.Random(settings.seed), [MemoryBudget(settings.budget_mib * 2**20) for _ in range(PEERS)]
    # Whole numbers, whose mean is exact in float32, and different everywhere, so that nothing can be mixed up.
    vectors = [np.arange(settings.mib * 2**18, dtype=np.float32) % 4096 + index for index in range(PEERS)]
    mean = vectors[0] + np.float32((PEERS - 1) / 2)
    latency, hosts = Constant(round_trip_ms / 2000), HostOptions(up_bps=1e9 * gbps, down_bps=1e9 * gbps)

    async def take_part(all_reduce: AllReduce, group: Group, vector: np.ndarray) -> None:
        result = await all_reduce.run(group, vector, size=vector.size)
        if not result.complete or not np.array_equal(result.average, mean):
            raise WrongResult(f"{result.received:.3f} of the vector is an average, or it is another than the mean")

    async def main() -> list[float]:
        async with AsyncExitStack() as stack:
            simulated = simulate(seed=settings.seed, latency=latency, hosts=hosts, tick_s=_TICK_S)
            network = await stack.enter_async_context(simulated)
            all_reduces, members = [], []
            for index, budget in enumerate(budgets):
                here, peer_id = Address(f"peer{index}", SIM_PORT), PeerId.draw(rng)
                transport = network.transport(here.host, peer_id)
                opened = open_rpc_peer(transport, peer_id=peer_id, listen=here, memory_budget=budget)
                caller = await stack.enter_async_context(opened)
                all_reduces.append(AllReduce(caller, prefix="wan", config=AllReduceConfig()))
                members.append(Member(peer_id=peer_id, address=here, wanted_slot=index))
            seconds = []
            for _ in range(NUM_GROWING + 4):
                group = Group(group_id=rng.randbytes(GROUP_ID_BYTES), members=tuple(members), side=PEERS)
                started = trio.current_time()
                async with trio.open_nursery() as nursery:
                    for all_reduce, vector in zip(all_reduces, vectors, strict=True):
                        nursery.start_soon(take_part, all_reduce, group, vector)
                seconds.append(trio.current_time() - started)
                await trio.sleep(1.0)
            return seconds

    return run(main, seed=settings.seed), max(budget.peak_bytes for budget in budgets) / 2**20


def measure_all_reduces(run: Run[WanSettings]) -> None:
    """Measure shares of each line, of the first all-reduce and of those that count."""
    settings = run.settings
    for gbps, round_trip_ms in QUICK_LINES if settings.quick else LINES:
        run.say(f"{settings.mib} MiB among {PEERS} peers at {gbps:g} Gb/s and {round_trip_ms:g} ms")
        seconds, peak_mib = all_reduce_times(gbps, round_trip_ms, settings)
        shares = [ideal_s(gbps, round_trip_ms, mib=settings.mib) / each for each in seconds]
        line = f"{gbps:g}g_{round_trip_ms:g}ms"
        for name, label, values in (("wan", "", shares[NUM_GROWING:]), ("first", ", the first", shares[:1])):
            where = {"name": f"{name}_share_{line}", "line": f"{gbps:g} Gb/s{label}", "x": round_trip_ms}
            run.log("allreduce", **where, values=values, peak_mib=peak_mib)


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
