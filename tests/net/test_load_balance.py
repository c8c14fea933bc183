"""Shares of an all-reduce by bandwidth, role and computing."""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from dmoe_net.averaging.collaboration.rounds import cautious
from dmoe_net.averaging.grouping.group import Group, Member, Role
from dmoe_net.averaging.reduction.load_balance import bytes_each_way, peer_fractions, split_by_shares
from dmoe_net.averaging.speeds import BANDWIDTHS_BPS, UNKNOWN, Speeds
from dmoe_net.identity import Address
from tests.net.sim_hosts import peer

N, C, A = Role.NODE, Role.CLIENT, Role.AUXILIARY


def even(*bandwidths: float | None, reducing: float | None = None) -> list[Speeds]:
    """Lines as fast up as down."""
    return [Speeds(up=each, down=each, reducing=reducing) for each in bandwidths]


def shares_of_nodes(*bandwidths: float | None) -> tuple[float, ...]:
    return peer_fractions([N] * len(bandwidths), even(*bandwidths))


def ends_of(roles: Sequence[Role], speeds: Sequence[Speeds], shares: Sequence[float]) -> list[float]:
    """When each member ends with a vector of one byte, by the model at the head of `load_balance`."""
    vectors, ends = sum(role is not A for role in roles), list[float]()
    for role, speed, share in zip(roles, speeds, shares, strict=True):
        moved = {N: 1 + (vectors - 2) * share, A: vectors * share, C: 1.0}[role]
        added_s = vectors * share / (speed.reducing or math.inf) if vectors > 1 else 0.0
        ends.append(max(moved / min(speed.up, speed.down), added_s))
    return ends


def optimum(roles: Sequence[Role], speeds: Sequence[Speeds]) -> float:
    """The programme as it stands, by SciPy: the smallest T for which shares exist, one row for each limit.

    Each direction has a row of its own, from what is sent and received one by one.
    """
    count, vectors = len(roles), sum(role is not A for role in roles)
    rows, limits = list[Any](), list[float]()
    for member, (role, speed) in enumerate(zip(roles, speeds, strict=True)):
        own = 0 if role is A else 1
        # Sent: the own vector but for the own part, and answers to all other vectors. Received: the same, mirrored.
        of_lines, of_adding = (vectors - 2 * own, -own), (vectors, 0.0)
        for rate, (factor, limit) in ((speed.up, of_lines), (speed.down, of_lines), (speed.reducing, of_adding)):
            if rate is not None:
                rows.append(np.zeros(count + 1))
                rows[-1][member], rows[-1][-1] = factor, -rate
                limits.append(limit)
    bounds = [(0.0, 0.0 if role is C else 1.0) for role in roles] + [(0.0, None)]
    scale = min(min(speed.up or 1, speed.down or 1) for speed in speeds)  # T of about 1: the solver's tolerances
    found = linprog(
        [0.0] * count + [1.0],
        A_ub=np.array(rows) / np.array([1.0] * count + [scale]),
        b_ub=limits,
        A_eq=[[1.0] * count + [0.0]],
        b_eq=[1.0],
        bounds=bounds,
    )
    assert found.status == 0, found.message
    return float(found.fun / scale)


def drawn(seed: int) -> tuple[list[Role], list[Speeds]]:
    """A swarm of 3 to 24 by chance: uneven lines, some clients and auxiliaries, some slow at adding up."""
    rng = random.Random(seed)
    roles = [N, *rng.choices([N, C, A], [6, 2, 2], k=rng.randint(1, 22)), N]
    speeds = []
    for _ in roles:
        up = 10 ** rng.uniform(5, 8)
        reducing = 10 ** rng.uniform(5, 8) if rng.random() < 0.3 else None
        speeds.append(Speeds(up=up, down=up * rng.choice([1, 1, 10, 0.3]), reducing=reducing))
    return roles, speeds


def test_equal_peers_reduce_equal_shares() -> None:
    """They do so also where nobody knows its bandwidth. A client's share is exactly zero, however fast it is."""
    assert shares_of_nodes(*[5e6] * 4) == pytest.approx([0.25] * 4)
    assert shares_of_nodes(*[None] * 5) == pytest.approx([0.2] * 5)
    assert peer_fractions([N, C, N], even(1e6, 1e9, 1e6)) == (0.5, 0.0, 0.5)


def test_unknown_bandwidths_count_as_the_mean_in_their_direction() -> None:
    """The mean is over those who reduce. A direction of which nobody knows anything is no limit."""
    assert shares_of_nodes(1e6, None, 3e6) == pytest.approx(shares_of_nodes(1e6, 2e6, 3e6))
    known = [Speeds(up=1e6, down=9e6), Speeds(up=3e6, down=1.5e6), UNKNOWN]
    assert peer_fractions([N] * 3, known) == pytest.approx(shares_of_nodes(1e6, 1.5e6, 2e6))
    only_up = [Speeds(up=1e6), Speeds(up=3e6), UNKNOWN, Speeds(up=1e8)]
    assert peer_fractions([N, N, N, C], only_up) == pytest.approx(
        peer_fractions([N, N, N, C], even(1e6, 3e6, 2e6, 1e8))
    )


def test_the_shares_of_three_peers_by_hand() -> None:
    """With three peers t = (1 + f) / b. Speeds 1, 1, 2: equal ends need 1 + f1 = (1 + f3) / 2, so f1 = 0, f3 = 1."""
    assert shares_of_nodes(1e6, 1e6, 2e6) == pytest.approx([0.0, 0.0, 1.0], abs=1e-6)
    # 4, 4, 5: (1 + f1) / 4 = (1 + f3) / 5 and 2 f1 + f3 = 1 give f1 = 3/13, f3 = 7/13.
    assert shares_of_nodes(4e6, 4e6, 5e6) == pytest.approx([3 / 13, 3 / 13, 7 / 13])


def test_the_slower_direction_counts() -> None:
    """An answer is as long as what it answers: up 1 and down 10 is as slow as 1 both ways."""
    uneven = [Speeds(up=4e6, down=4e7), Speeds(up=9e8, down=4e6), Speeds(up=5e6, down=5e6)]
    assert peer_fractions([N] * 3, uneven) == pytest.approx(shares_of_nodes(4e6, 4e6, 5e6))


def test_auxiliaries_by_hand() -> None:
    """Three nodes of speed 1 and an auxiliary of speed 3: 1 + f = 3 fa / 3 and 3 f + fa = 1 give f = 0, fa = 1."""
    assert peer_fractions([N, N, N, A], even(1e6, 1e6, 1e6, 3e6)) == pytest.approx([0, 0, 0, 1], abs=1e-9)
    # Of speed 1: 1 + f = 3 fa, so 3 (3 fa - 1) + fa = 1: fa = 0.4, f = 0.2.
    assert peer_fractions([N, N, N, A], even(1e6, 1e6, 1e6, 1e6)) == pytest.approx([0.2, 0.2, 0.2, 0.4])
    # Between two clients, auxiliaries share by speed: 2 f / b is the same for all.
    assert peer_fractions([C, A, C, A], even(1e6, 1e6, 1e6, 3e6)) == pytest.approx([0, 0.25, 0, 0.75])


def test_adding_up_by_hand() -> None:
    """Four nodes, T the unit of time: with lines of 8, one that adds up at 2 reduces 2 T / 4 as soon as that is less
    than (8 T - 1) / 2: three others (8 T - 1) / 2 each. 12.5 T = 2.5, T = 0.2: 0.1 and 0.3."""
    speeds = [*even(8e6, reducing=2e6), *even(8e6, 8e6, 8e6)]
    assert peer_fractions([N] * 4, speeds) == pytest.approx([0.1, 0.3, 0.3, 0.3])


def test_with_two_vectors_or_one_nodes_do_it_alone() -> None:
    """Their lines carry the same whatever they reduce."""
    two = {(N, N): (0.5, 0.5), (N, N, A): (0.5, 0.5, 0.0), (N, C, A): (1.0, 0.0, 0.0)}
    one = {(N,): (1.0,), (N, A): (1.0, 0.0), (C, A): (0.0, 1.0), (A, A): (0.5, 0.5)}
    for roles, expected in {**two, **one}.items():
        assert peer_fractions(roles, even(*[1e6] * len(roles))) == expected


def test_two_who_are_slow_at_adding_up_share_by_that() -> None:
    """Speeds of 1 and 3 get a quarter and three; with an auxiliary whose line is as slow, a fifth each and three."""
    two = [*even(1e8, reducing=1e6), *even(1e9, reducing=3e6)]
    assert peer_fractions([N, N], two) == pytest.approx([0.25, 0.75])
    assert peer_fractions([N, N, A], [*two, *even(1e6)]) == pytest.approx([0.2, 0.6, 0.2])


@pytest.mark.parametrize("seed", range(60))
def test_nobody_could_end_earlier(seed: int) -> None:
    """SciPy's optimum is ours, to the hundredth that dropped shares may cost, and never better. All who reduce end
    together; nodes that do not would end no earlier with their vectors alone."""
    roles, speeds = drawn(seed)
    shares = peer_fractions(roles, speeds)
    ends, best = ends_of(roles, speeds, shares), optimum(roles, speeds)
    assert best * (1 - 1e-6) <= max(ends) <= best * 1.0102
    together = [end for end, share in zip(ends, shares, strict=True) if share]
    assert max(together) <= min(together) * 1.0102
    for role, speed, end, share in zip(roles, speeds, ends, shares, strict=True):
        if role is N and not share and speed.reducing is None:
            assert end >= max(together) * 0.98


def test_a_slow_sender_does_not_decide_the_others_shares() -> None:
    """It is last whatever it reduces, and leaves the rest to end together: (1 + 2 f) / b is the same for both."""
    for slow in (1e6, 1e4, 1e3):
        shares = peer_fractions([N, N, N, C], even(slow, 4e6, 1.7e6, 1e3))
        assert shares[0] == shares[3] == 0.0
        assert (1 + 2 * shares[1]) / 4e6 == pytest.approx((1 + 2 * shares[2]) / 1.7e6)


unknown_or_any = st.none() | st.floats(*BANDWIDTHS_BPS)
speeds_of_any_peer = st.builds(Speeds, up=unknown_or_any, down=unknown_or_any, reducing=unknown_or_any)


@given(st.lists(st.tuples(st.sampled_from(Role), speeds_of_any_peer), min_size=1, max_size=12))
def test_shares_add_up_whatever_is_claimed(members: list[tuple[Role, Speeds]]) -> None:
    """No numbers that peers may claim make them anything but fractions, and a client never has one."""
    roles, speeds = [role for role, _ in members], [speed for _, speed in members]
    if all(role is C for role in roles):
        with pytest.raises(ValueError, match="can reduce"):
            peer_fractions(roles, speeds)
        return
    shares = peer_fractions(roles, speeds)
    assert math.fsum(shares) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in shares)
    assert not any(share for role, share in zip(roles, shares, strict=True) if role is C)


def test_a_large_group_is_shared_out() -> None:
    """Speeds of 1024 members span five orders: dropped shares cost less than a hundredth."""
    rng = random.Random(0)
    roles, speeds = [N] * 1024, even(*(10 ** rng.uniform(4, 9) for _ in range(1024)))
    shares = peer_fractions(roles, speeds)
    times = [time for time, share in zip(ends_of(roles, speeds, shares), shares, strict=True) if share]
    assert max(times) <= min(times) * 1.0102


def test_nobody_and_unequal_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="group of 0 can reduce"):
        peer_fractions([], [])
    with pytest.raises(ValueError, match="shorter"):
        peer_fractions([N, N], even(1e6))


def test_what_is_sent_is_received() -> None:
    """All members together send what all together receive, and nobody more than its own and the answers."""
    roles, shares = [N, N, C, A], [0.5, 0.2, 0.0, 0.3]
    # A node sends 1 - f and 2 f, an auxiliary 3 f, a client its whole vector.
    expected = [0.5 + 1.0, 0.8 + 0.4, 1.0, 0.9]
    given = [bytes_each_way(role, share, num_vectors=3) for role, share in zip(roles, shares, strict=True)]
    assert given == pytest.approx(expected)


@given(st.integers(0, 10**9), st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(lambda f: sum(f) > 0.01))
def test_whole_numbers_add_up(size: int, shares: list[float]) -> None:
    """Each is within one of its exact part, and those with no share get nothing."""
    counts = split_by_shares(size, shares)
    assert sum(counts) == size
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - size * share / sum(shares)) < 1 + 1e-6
        assert share > 0 or count == 0


def test_an_unknown_line_never_gets_more_than_an_equal_share() -> None:
    """The mean of a fast and a slow line that are known would count four unknown ones as fairly fast."""
    rng = random.Random(0)
    for _ in range(200):
        num_members = rng.randint(2, 9)
        known = [rng.choice([None, rng.uniform(1e4, 1e8)]) for _ in range(num_members)]
        members = tuple(
            Member(peer_id=peer(str(place)), address=Address("host", 1 + place), speeds=Speeds(up=up, down=up))
            for place, up in enumerate(known)
        )
        group = cautious(Group(group_id=b"g" * 16, members=members, side=num_members))
        shares = peer_fractions([each.role for each in group.members], [each.speeds for each in group.members])
        for up, share, member, before in zip(known, shares, group.members, members, strict=True):
            if up is None:
                assert share <= 1 / num_members + 1e-9
            else:
                assert member == before
