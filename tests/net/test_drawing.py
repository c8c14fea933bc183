"""The few numbers of a vector that a group averages."""

import functools

import numpy as np
import pytest
import trio

from dmoe_net.averaging.averager import AveragingStep
from dmoe_net.averaging.drawing import drawn_places, drawn_size, put_back
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from dmoe_net.averaging.opening import open_averager
from dmoe_net.averaging.plan import AveragingPlan
from tests.net.averaging_peers import CONFIG
from tests.net.averaging_swarm import Swarm, in_swarm, open_place


def test_places_are_distinct_fair_and_the_same_for_all() -> None:
    """Each of 1,000 numbers is in one of ten draws of 100; another group draws others."""
    draws = [drawn_places(number.to_bytes(16), 1000, 100) for number in range(2000)]
    assert all(np.all(np.diff(places) > 0) and places[0] >= 0 and places[-1] < 1000 for places in draws)
    counts = np.bincount(np.concatenate(draws), minlength=1000)
    # 2,000 draws with chance 0.1: 200 expected, standard deviation 13.4; the furthest of 1,000 is within 5 of these.
    assert abs(counts - 200).max() < 67
    np.testing.assert_array_equal(drawn_places(b"group", 1000, 100), drawn_places(b"group", 1000, 100))
    assert not np.array_equal(draws[0], draws[1])


@pytest.mark.parametrize(("size", "count"), [(1, 1), (7, 7), (7, 5), (2**33, 3)])
def test_places_of_odd_sizes(size: int, count: int) -> None:
    """All of them, most of them, and a few of very many."""
    places = drawn_places(b"group", size, count)
    assert len(set(places.tolist())) == count
    assert 0 <= places.min() <= places.max() < size


def test_what_the_network_must_agree_on_does_not_change() -> None:
    """Peers of other versions of this code and of NumPy draw the same: these were computed once."""
    assert drawn_places(b"\0" * 16, 100, 5).tolist() == [0, 33, 59, 76, 84]


def test_sizes_and_shares() -> None:
    """At least one, at most all; a share is above 0 and at most 1."""
    assert [drawn_size(1000, share) for share in (1e-9, 0.005, 0.0051, 1.0)] == [1, 5, 6, 1000]
    for wrong in (0.0, -1.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            drawn_size(10, wrong)
    whole = np.arange(5, dtype=np.float32)
    places = np.array([1, 4])
    np.testing.assert_array_equal(put_back(whole, places, np.float32([7, 8])), [0, 7, 2, 3, 8])
    np.testing.assert_array_equal(whole, np.arange(5))


def test_a_group_averages_a_few_numbers_and_leaves_the_rest() -> None:
    """Three peers: a tenth of each vector becomes the mean of all three, the same places at all; few bytes travel."""
    vectors = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32)

    async def average(swarm: Swarm, number: int) -> None:
        async with (
            open_place(swarm, f"peer{number}") as place,
            open_averager(
                *(place.rpc, place.dht, AveragingPlan.of(size=1000, grid=MoshpitGrid(side=3, dims=1), share=0.1)),
                prefix="run",
                rng=place.rng,
                config=CONFIG,
            ) as averager,
        ):
            steps[number] = await averager.step(vectors[number])
            ended[number].set()
            await trio.sleep_forever()

    async def body(swarm: Swarm) -> None:
        for number in range(3):
            swarm.network.start(f"peer{number}", functools.partial(average, swarm, number))
        with trio.fail_after(100):
            for each in ended:
                await each.wait()

    steps: dict[int, AveragingStep] = {}
    ended = [trio.Event() for _ in range(3)]
    in_swarm(body)
    changed = [steps[number].average != vectors[number] for number in range(3)]
    for step, own in zip(steps.values(), [changed[number] for number in steps], strict=True):
        assert (len(step.peers), step.received, int(own.sum())) == (3, 1.0, 100)
        np.testing.assert_array_equal(own, changed[0])
        np.testing.assert_allclose(step.average[own], vectors.mean(axis=0)[own], rtol=1e-5, atol=1e-6)
        # 2 (n - 1) / n of 100 float32, up to how parts are cut.
        assert 400 <= step.moved_bytes <= 700
