"""Fit of an all-reduce's shares to the members' lines: against the optimum, and against equal shares.

The time of an averaging is that of its last member, by the model of `dmoe_net.averaging.reduction.load_balance`; the
optimum is that of DeDLOC's linear programme, which SciPy solves here from its rows. `simulated_seconds` has the real
all-reduce take the time, on a simulated network.
"""

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np
import trio
from scipy.optimize import linprog

from dmoe_net.averaging.grouping.group import GROUP_ID_BYTES, Group, Member, Role
from dmoe_net.averaging.reduction.all_reduce import AllReduce
from dmoe_net.averaging.reduction.load_balance import bytes_each_way, peer_fractions
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.averaging.speeds import UNKNOWN, Speeds
from dmoe_net.identity import Address, PeerId
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.sim.links import Constant, HostOptions
from dmoe_net.transport.sim.simulation import run, simulate

PAPER_GAIN = 1.9
"""Factor by which DeDLOC's averaging of ALBERT-large among servers and workstations is faster than an all-reduce with
equal shares, as its authors say."""

_MEGABIT = 125_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Roles and speeds of members that average together."""

    roles: tuple[Role, ...]
    speeds: tuple[Speeds, ...]
    """Speeds of each member. Lines are known."""

    def seconds(self, shares: Sequence[float]) -> float:
        """Return the seconds that a vector of one byte takes with these shares, until the last member ends."""
        num_vectors, longest_s = sum(role is not Role.AUXILIARY for role in self.roles), 0.0
        for role, speed, share in zip(self.roles, self.speeds, shares, strict=True):
            assert speed.up is not None
            assert speed.down is not None
            moving_s = bytes_each_way(role, share, num_vectors=num_vectors) / min(speed.up, speed.down)
            reducing_s = num_vectors * share / (speed.reducing or math.inf) if num_vectors > 1 else 0.0
            longest_s = max(longest_s, moving_s, reducing_s)
        return longest_s

    def equal_shares(self) -> tuple[float, ...]:
        """As much for each that can reduce."""
        count = sum(role is not Role.CLIENT for role in self.roles)
        return tuple(0.0 if role is Role.CLIENT else 1 / count for role in self.roles)

    def our_shares(self) -> tuple[float, ...]:
        """As a group shares out."""
        return peer_fractions(self.roles, self.speeds)

    def optimal_seconds(self) -> float:
        """Return the seconds that a vector of one byte takes with the best of all shares, by SciPy's `linprog`.

        The unknowns are the shares f, and T, which is minimised: for every member `traffic(f) <= rate * T` in either
        direction, and its vectors added up in time.
        """
        num_members, num_vectors = len(self.roles), sum(role is not Role.AUXILIARY for role in self.roles)
        rows: list[tuple[int, float, float, float]] = []  # member, bytes for a share of 1, bytes anyhow, rate
        for index, (role, speed) in enumerate(zip(self.roles, self.speeds, strict=True)):
            assert speed.up is not None
            assert speed.down is not None
            own = 0 if role is Role.AUXILIARY else 1
            rows += [(index, num_vectors - 2 * own, own, rate) for rate in (speed.up, speed.down)]
            if speed.reducing is not None:
                rows.append((index, num_vectors, 0, speed.reducing))
        unit = 1 / min(rate for *_, rate in rows)  # of T, so that all numbers are near 1
        limits = np.zeros((len(rows), num_members + 1))
        for row, (index, for_share, _, rate) in zip(limits, rows, strict=True):
            row[index], row[-1] = for_share, -rate * unit
        found = linprog(
            [0.0] * num_members + [1.0],
            A_ub=limits,
            b_ub=[-anyhow for _, _, anyhow, _ in rows],
            A_eq=[[1.0] * num_members + [0.0]],
            b_eq=[1.0],
            bounds=[(0.0, 0.0 if role is Role.CLIENT else 1.0) for role in self.roles] + [(0.0, None)],
        )
        if found.status != 0:
            raise RuntimeError(f"linprog found no optimum: {found.message}")
        return float(found.fun) * unit


def _even(megabits: float, count: int) -> list[Speeds]:
    return [Speeds(up=megabits * _MEGABIT, down=megabits * _MEGABIT)] * count


def _nodes(*speeds: Speeds, auxiliaries: Sequence[Speeds] = ()) -> Members:
    roles = (*[Role.NODE] * len(speeds), *[Role.AUXILIARY] * len(auxiliaries))
    return Members(roles=roles, speeds=(*speeds, *auxiliaries))


PAPER_SWARMS: Mapping[str, Members] = {
    "servers": _nodes(*_even(1000, 8)),
    "workstations": _nodes(*_even(200, 16)),
    "hybrid": _nodes(*_even(1000, 8), *_even(200, 16)),
    "workstations_and_auxiliaries": _nodes(*_even(200, 16), auxiliaries=_even(1000, 4)),
}
"""The peers of the paper's experiments: 8 servers of 1 Gb/s and 16 workstations of 200 Mb/s, each alone and together;
and, since the paper adds four auxiliary peers without saying how fast they are, four of a server's line."""


def random_members(rng: random.Random) -> Members:
    """3 to 64 by chance, two nodes at least: lines of 5 Mb/s to 1 Gb/s up and once to ten times that down; a sixth each
    of clients and auxiliaries; a quarter who add up no faster than 10 to 1000 MB/s."""
    count = rng.randint(3, 64)
    drawn = rng.choices([Role.NODE, Role.CLIENT, Role.AUXILIARY], [4, 1, 1], k=count - 2)
    speeds = []
    for _ in range(count):
        up = math.exp(rng.uniform(math.log(5), math.log(1000))) * _MEGABIT
        reducing = math.exp(rng.uniform(math.log(1e7), math.log(1e9))) if rng.random() < 0.25 else None
        speeds.append(Speeds(up=up, down=up * math.exp(rng.uniform(0, math.log(10))), reducing=reducing))
    return Members(roles=(Role.NODE, Role.NODE, *drawn), speeds=tuple(speeds))


def share_figures(*, num_swarms: int = 200, seed: int = 0) -> dict[str, float]:
    """Compare our shares by the time of an averaging: to the optimum in random swarms, to equal shares in the paper's.

    Args:
      num_swarms: random swarms. seed: of what is drawn.

    Returns: `shares_over_optimum`, the largest of all swarms, and `mean_shares_over_optimum`;
      `gain_over_equal_NAME` for each of `PAPER_SWARMS`, the time with equal shares over that with ours;
      `mean_gain_over_equal` of the random swarms; and `paper_gain_over_equal`, of the hybrid.

    Raises:
      ValueError: there is to be no swarm.
    """
    if num_swarms < 1:
        raise ValueError(f"num_swarms must be at least 1, got {num_swarms}")
    rng = random.Random(seed)
    swarms = [random_members(rng) for _ in range(num_swarms)]
    over_optimum = [each.seconds(each.our_shares()) / each.optimal_seconds() for each in swarms]
    return {
        "shares_over_optimum": max(over_optimum),
        "mean_shares_over_optimum": math.fsum(over_optimum) / num_swarms,
        "mean_gain_over_equal": math.fsum(map(_gain, swarms)) / num_swarms,
        **{f"gain_over_equal_{name}": _gain(members) for name, members in PAPER_SWARMS.items()},
        "paper_gain_over_equal": PAPER_GAIN,
    }


def _gain(members: Members) -> float:
    return members.seconds(members.equal_shares()) / members.seconds(members.our_shares())


def simulated_seconds(
    members: Members,
    *,
    size: int,
    knows_speeds: bool,
    latency_s: float = 0.001,
    config: AllReduceConfig = AllReduceConfig(),  # noqa: B008 (frozen)
) -> float:
    """Return the virtual seconds that the real all-reduce takes these members on a simulated network.

    Args:
      size: float32 numbers in the vector.
      knows_speeds: whether the group shares out by its members' speeds; if not, alike.
      latency_s: one-way, between any two.
      config: of the all-reduce. The model knows no chunks: the smaller they are, the nearer it is.

    Raises:
      RuntimeError: somebody did not get all of the average.
    """
    lines = {_host(index): speed for index, speed in enumerate(members.speeds)}

    def options(host: str) -> HostOptions:
        up, down = lines[host].up, lines[host].down
        return HostOptions(up_bps=8 * (up or math.inf), down_bps=8 * (down or math.inf))

    async def main() -> float:
        async with AsyncExitStack() as stack:
            network = await stack.enter_async_context(simulate(latency=Constant(latency_s), hosts=options))
            reduces, facts = [], []
            for index, (role, speed) in enumerate(zip(members.roles, members.speeds, strict=True)):
                peer_id, host = PeerId(index.to_bytes(32, "big")), _host(index)
                listen = None if role is Role.CLIENT else Address(host, 1)
                rpc = await stack.enter_async_context(
                    open_rpc_peer(network.transport(host, peer_id), peer_id=peer_id, listen=listen)
                )
                reduces.append(AllReduce(rpc, prefix="shares", config=config))
                known = speed if knows_speeds else UNKNOWN
                facts.append(Member(peer_id=peer_id, address=rpc.address, role=role, wanted_slot=index, speeds=known))
            group = Group(group_id=bytes(GROUP_ID_BYTES), members=tuple(facts), side=len(facts))

            async def average(index: int) -> None:
                vector = None if members.roles[index] is Role.AUXILIARY else np.full(size, index, np.float32)
                result = await reduces[index].run(group, vector, size=size)
                if not result.complete:
                    raise RuntimeError(f"member {index} has not all of the average: {result.received:.3f}")

            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                for index in range(len(facts)):
                    nursery.start_soon(average, index)
            return trio.current_time() - began

    return run(main)


def _host(index: int) -> str:
    return f"host{index}"
