"""What averaging in groups costs and gains beside one group of all: time, bytes and connections of a step's averaging.

On the simulated network with the code of production: peers find their group, average and settle, twice. The first time
most of them have no connection to each other yet.
"""

import math
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np
import trio

from dmoe_jax.peer import SIM_PORT, PeerConfig, SwarmPeer, open_peer
from experiments.collaborative.world import ROOT
from net.averaging.collaboration.progress import NO_CHAIN
from net.averaging.collaboration.rounds import Averaged, RoundConfig, StepAveraging, plan_of
from net.averaging.grouping.group import Role
from net.averaging.speeds import UNKNOWN
from net.identity import Address, Contact
from net.transport.sim import HostOptions, run, simulate
from net.transport.sim.links import Constant
from net.transport.sim.network import SimNetwork, Statistics

_NUMBERS = {"long": 1_000_000, "short": 50_000}
"""In a vector: for four megabytes lines are what counts, for a fiftieth of it round trips are."""

_LINE = {"bits_per_s": 1e8, "latency_s": 0.05}
"""Of every peer: 100 Mb/s each way, and a round trip of 100 ms between any two."""

_FORMING_S = 4.0
_REST_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """One averaging of all peers."""

    seconds: float
    """From when the group began to when the last peer had settled, virtual."""
    nbytes: float
    """Sent by a peer meanwhile, all messages included, over the bytes of the vector; the mean of all peers."""
    frames: float
    """Messages, or parts of large ones, that a peer sent meanwhile; the mean of all peers."""
    connections: float
    """That a peer has open then, the mean of all peers."""


def group_figures(
    sizes: Sequence[int], *, seed: int = 0, say: Callable[[str], None] = lambda text: None
) -> dict[str, float]:
    """Averaging in groups of the square root of all, beside one group of all.

    Args:
      sizes: peers in each swarm, square numbers. seed: of what is drawn. say: told how far it is.

    Returns: for each size and each of two lengths of vectors, `groups_seconds_SIZE_LENGTH` and `one_group_seconds_...`,
      from the second averaging, whose peers know each other; the same with `first_`, of the first; with `_messages`
      for the messages of a peer; and `groups_bytes_over_one_group`, the largest ratio of all.
    """
    found: dict[str, float] = {}
    ratios = []
    for num_peers in sizes:
        for length, size in _NUMBERS.items():
            played = {}
            for name, group_size in (("one_group", None), ("groups", math.isqrt(num_peers))):
                say(f"groups: {num_peers} peers, {size} numbers, {name.replace('_', ' ')}")
                first, second = averagings(num_peers, group_size=group_size, size=size, seed=seed, **_LINE)
                found[f"{name}_first_seconds_{num_peers}_{length}"] = first.seconds
                found[f"{name}_seconds_{num_peers}_{length}"] = second.seconds
                found[f"{name}_messages_{num_peers}_{length}"] = second.frames
                played[name] = second
            ratios.append(played["groups"].nbytes / played["one_group"].nbytes)
    return {**found, "groups_bytes_over_one_group": max(ratios)}


def averagings(
    num_peers: int, *, group_size: int | None, size: int, bits_per_s: float, latency_s: float, seed: int = 0
) -> list[Averaging]:
    """Two averagings of the same peers, one after the other.

    Args:
      num_peers: that average.
      group_size: of `CollaborationConfig`.
      size: float32 numbers in the vector.
      bits_per_s: of everybody's line, in each direction. latency_s: one way.

    Raises:
      RuntimeError: somebody has another average than the others, or none, or it is wrong.
    """

    async def main() -> list[Averaging]:
        lines = HostOptions(up_bps=bits_per_s, down_bps=bits_per_s)
        async with simulate(seed=seed, latency=Constant(latency_s), hosts=lines) as network, AsyncExitStack() as stack:
            places = []
            for number in range(num_peers + 1):
                join, host = ([Address(ROOT, SIM_PORT)], f"peer{number}") if number else ([], ROOT)
                opened = open_peer(join, PeerConfig(network=network, host=host, seed=seed + number))
                places.append(await stack.enter_async_context(opened))
            nursery = await stack.enter_async_context(trio.open_nursery())
            plan = plan_of(size=size, side=256, schema="groups", group_size=group_size)
            rounds = [
                StepAveraging(
                    place.rpc,
                    place.dht,
                    prefix="groups",
                    plan=plan,
                    role=Role.NODE,
                    speeds=UNKNOWN,
                    measures_line=False,
                    nursery=nursery,
                    rng=random.Random(f"{seed}/{number}"),
                    config=RoundConfig(),
                )
                for number, place in enumerate(places[1:])
            ]
            found = []
            for step in range(2):
                found.append(await _one(network, places[1:], rounds, step=step, size=size))
                await trio.sleep(_REST_S)
            nursery.cancel_scope.cancel()
        return found

    return run(main, seed=seed)


async def _one(
    network: SimNetwork, places: list[SwarmPeer], rounds: list[StepAveraging], *, step: int, size: int
) -> Averaging:
    begins_at = places[0].dht.clock.now() + _FORMING_S
    contacts = [Contact(place.rpc.peer_id, place.rpc.address) for place in places if place.rpc.address is not None]
    began, done = list[tuple[float, Statistics]](), dict[int, Averaged | None]()
    values = np.arange(size, dtype=np.float32) % 1024  # whose means are exact in float32

    async def one(number: int) -> None:
        others = [each for each in contacts if each.peer_id != places[number].rpc.peer_id]
        group = await rounds[number].find_group(
            step=step, chain=NO_CHAIN, begins_at=begins_at, others=others, fewest=lambda: len(places)
        )
        began.append((trio.current_time(), network.statistics()))
        if group is not None:
            done[number] = await rounds[number].average(group, values + number, weight=1.0)

    async with trio.open_nursery() as nursery:
        for number in range(len(places)):
            nursery.start_soon(one, number)
    at, before = min(began, key=lambda each: each[0])
    after = network.statistics()
    expected = values + (len(places) - 1) / 2
    for number in range(len(places)):
        each = done.get(number)
        if each is None or len(each.members) < len(places) or not np.array_equal(each.mean, expected):
            raise RuntimeError(f"peer {number} has no average, or not that of all {len(places)}")
    return Averaging(
        seconds=trio.current_time() - at,
        nbytes=(after.nbytes - before.nbytes) / (len(places) * 4 * size),
        frames=(after.frames - before.frames) / len(places),
        connections=2 * after.links / len(places),
    )
