"""Shares of an all-reduce against SciPy's optimum, equal ones, and the simulated network."""

import pytest

from dmoe_net.averaging.grouping.group import Role
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.averaging.speeds import Speeds
from experiments.collaborative.shares import (
    Members,
    share_figures,
    simulated_seconds,
)


def test_the_bar() -> None:
    """200 random swarms within 1.05 of the optimum. Servers and workstations by hand: with equal shares the slow end
    after (1 + 22 / 24) / 0.2 = 9.58, with ours when they have sent their own, 1 / 0.2 = 5, for the servers reduce all
    of it in (22 + 8) / 8 = 3.75. Alike members have nothing to win; with auxiliaries five times as fast, 16 nodes go
    from (1 + 14 / 20) / 0.2 = 8.5 to 5."""
    figures = share_figures()
    assert 1 - 1e-6 <= figures["mean_shares_over_optimum"] <= figures["shares_over_optimum"] <= 1.05
    assert figures["gain_over_equal_hybrid"] == pytest.approx(23 / 12)
    assert figures["gain_over_equal_workstations_and_auxiliaries"] == pytest.approx(1.7)
    assert figures["gain_over_equal_servers"] == figures["gain_over_equal_workstations"] == pytest.approx(1.0)
    assert figures["mean_gain_over_equal"] > 1.2
    with pytest.raises(ValueError, match="at least 1, got 0"):
        share_figures(num_swarms=0)


@pytest.mark.parametrize("roles", [(Role.NODE,) * 5, (Role.AUXILIARY, *(Role.NODE,) * 3, Role.CLIENT)])
def test_the_model_is_what_the_all_reduce_takes(roles: tuple[Role, ...]) -> None:
    """Two fast lines and three slow ones, which receive faster than they send, in chunks of 4096 numbers: within a
    fifth of the model, and faster than with equal shares."""
    fast, slow = Speeds(up=12.5e6, down=12.5e6), Speeds(up=2.5e6, down=25e6)
    members = Members(roles=roles, speeds=(fast, fast, slow, slow, slow))
    size, config = 200_000, AllReduceConfig(chunk_bytes=4 * 4096)
    ours, equal = (
        simulated_seconds(members, size=size, knows_speeds=knows, config=config, latency_s=0.0)
        for knows in (True, False)
    )
    model = 4 * size * members.seconds(members.our_shares())
    assert model <= ours <= 1.2 * model
    assert ours < 0.8 * equal
