"""Auxiliary peers: they learn what is averaged, reduce it, and follow when that changes. In virtual time."""

from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from dmoe_net.averaging.assisting import assist
from dmoe_net.averaging.averager import AveragingStep
from dmoe_net.averaging.gathering import SparseLayout
from dmoe_net.averaging.grouping.group import Role
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from dmoe_net.averaging.plan import MAX_ASSISTED_SIZE, AveragingPlan, find_plan, parse_plan_untrusted, plan_key
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.wire.sparse import SparseCoding
from tests.net.averaging_peers import CONFIG, open_averaging, vector_of
from tests.net.averaging_swarm import Swarm, open_place, swarm_test

GRID = MoshpitGrid(side=3, dims=1)
SHORT = replace(CONFIG, step_timeout_s=10.0)
PLAN = AveragingPlan.of(size=50, grid=GRID, schema="")


def start_assistant(swarm: Swarm) -> list[Any]:
    """Start an auxiliary peer that knows the prefix and nothing else; return the list of what it is told."""
    told: list[Any] = []
    tells = {"on_plan": told.append, "on_round": told.append}

    async def main() -> None:
        async with open_place(swarm, "aux") as place:
            await assist(place.rpc, place.dht, prefix="x", rng=place.rng, config=SHORT, **tells)

    swarm.network.start("aux", main)
    return told


def start_trainer(swarm: Swarm, name: str, times: list[float], size: int = 50, **settings: Any) -> None:
    """A peer that averages its numbers at these times and then leaves; what came of it is in `swarm.done`."""
    plan, is_client = AveragingPlan.of(size=size, grid=GRID), name.startswith("client")

    async def main() -> None:
        opened = open_averaging(swarm, name, plan, client_mode=is_client, config=replace(SHORT, **settings))
        async with opened as averager:
            steps = swarm.done.setdefault(name, [])
            for time in times:
                await trio.sleep_until(time)
                steps.append(await averager.step(np.resize(vector_of(name), size)))

    swarm.network.start(name, main)


@swarm_test
async def test_it_reduces_all_of_what_three_slow_peers_average(swarm: Swarm) -> None:
    """It knows the name alone. By hand in `test_load_balance`: 0.4 of the vector is its part, and a node's 0.2."""
    names, told = [f"peer{number}" for number in range(3)], start_assistant(swarm)
    for name in names:
        start_trainer(swarm, name, [15.0, 30.0], speeds=Speeds(up=1e6, down=2e6))
    await trio.sleep_until(60.0)
    mean = np.mean([vector_of(name) for name in names], axis=0, dtype=np.float64)
    for name in names:
        assert [len(step.peers) for step in swarm.done[name]] == [4, 4]
        assert [step.moved_bytes for step in swarm.done[name]] == pytest.approx([4 * 50 * 1.2] * 2)
        for step in swarm.done[name]:
            np.testing.assert_allclose(step.average, mean, atol=1e-6)
    plan, *rounds = told
    assert plan == PLAN
    assert all(isinstance(each, AveragingStep) for each in rounds)
    assert [done.moved_bytes for done in rounds] == pytest.approx([4 * 50 * 3 * 0.4] * 2)
    assert [done.received for done in rounds] == pytest.approx([0.4] * 2)


@swarm_test
async def test_it_follows_when_another_model_is_trained(swarm: Swarm) -> None:
    """Two clients, who need it, end; two others with a longer vector begin, when the old plan has run out."""
    told = start_assistant(swarm)
    for name in ("client0", "client1"):
        start_trainer(swarm, name, [15.0])
    await trio.sleep_until(250.0)
    for name in ("client2", "client3"):
        start_trainer(swarm, name, [290.0], size=70)
    await trio.sleep_until(330.0)
    first, second = swarm.done["client0"][0], swarm.done["client2"][0]
    assert (len(first.peers), len(second.peers), second.received) == (3, 3, 1.0)
    assert [each.size for each in told if isinstance(each, AveragingPlan)] == [50, 70]
    # All of both vectors, each of two senders: 2 * 50 and 2 * 70 numbers of four bytes.
    assert [each.moved_bytes for each in told if isinstance(each, AveragingStep)] == [400.0, 560.0]


@swarm_test
async def test_most_peers_plan_counts_and_rubbish_does_not(swarm: Swarm) -> None:
    """One that nobody but its author has, nonsense, and a vector too large for us are passed over."""
    big, too_big = (AveragingPlan.of(size=size, grid=GRID, schema="") for size in (10**9, MAX_ASSISTED_SIZE + 1))
    async with open_place(swarm, "ann") as place, AsyncExitStack() as stack:
        assert await find_plan(place.dht, "x") is None
        plans = [big, PLAN, PLAN, *[too_big] * 3]
        for number, value in enumerate([*(each.to_value() for each in plans), [1, 2, 3], None, "plan"]):
            other = await stack.enter_async_context(open_place(swarm, f"peer{number}"))
            assert await other.dht.store(plan_key("x"), value, life_s=300)
        assert await find_plan(place.dht, "x") == PLAN


@swarm_test
async def test_a_peer_that_nobody_can_call_cannot_assist(swarm: Swarm) -> None:
    async with open_place(swarm, "client", client_mode=True) as place:
        with pytest.raises(ValueError, match="must listen"):
            await assist(place.rpc, place.dht, prefix="x", rng=place.rng)


def test_a_plan_travels() -> None:
    """It travels by value; its parts are checked, with the numbers in the message."""
    assert parse_plan_untrusted(PLAN.to_value()) == PLAN
    assert PLAN.schema != AveragingPlan.of(size=50, grid=GRID, schema="other").schema
    with pytest.raises(ValueError, match="got size 0"):
        AveragingPlan.of(size=0, grid=GRID, schema="")
    with pytest.raises(ValueError, match="side 1 has no groups of two"):
        AveragingPlan.of(size=5, grid=MoshpitGrid(side=1), schema="")
    with pytest.raises(RemoteProtocolError, match="at most 2147483647 cells"):
        parse_plan_untrusted([50, 2**31, 2, bytes(32), True, ""])


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**41) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=6,
)


@given(anything, st.integers(0, 6))
def test_garbage_is_only_ever_a_protocol_error(rubbish: Any, place: int) -> None:
    """Garbage comes as a whole, or in one place of a good plan."""
    for value in (rubbish, [*PLAN.to_value()[:place], rubbish, *PLAN.to_value()[place + 1 :]]):
        with suppress(RemoteProtocolError):
            assert isinstance(parse_plan_untrusted(value), AveragingPlan)


@swarm_test
async def test_nobody_reduces_sparse_vectors(swarm: Swarm) -> None:
    """They are gathered: an auxiliary peer that would wait for ever is told so."""
    layout = SparseLayout(coding=SparseCoding(), sizes=(64,))
    plan = AveragingPlan.of(size=64, grid=GRID, sparse=layout)
    with pytest.raises(ValueError, match="an auxiliary peer has nothing to do for them"):
        async with open_averaging(swarm, "aux", plan, config=replace(CONFIG, role=Role.AUXILIARY)):
            raise AssertionError("opened")
