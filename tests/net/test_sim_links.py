"""Latency models, lines, loss and events of the simulated network."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmoe_net.transport.sim.events import Partition, Reachability
from dmoe_net.transport.sim.links import (
    Constant,
    Exponential,
    HostOptions,
    LatencyModel,
    Line,
    LogNormal,
    Loss,
    RegionMatrix,
    model_between,
    stream_key,
)

MODELS: list[tuple[LatencyModel, float]] = [
    (Constant(0.05), 0.05),
    (Constant(0.0), 0.0),
    (Exponential(0.1), 0.0),
    (Exponential(0.1, 0.02), 0.02),
    (LogNormal(0.08, 0.5), 0.0),
    (LogNormal(0.08, 1.0, floor_s=0.03), 0.03),
    (LogNormal(0.08, 0.0), 0.0),
]
draws = st.floats(0.0, 1.0, exclude_max=True)


@given(model=st.sampled_from(MODELS), one=draws, other=draws)
def test_latencies_are_finite_above_the_floor_and_grow_with_the_draw(
    model: tuple[LatencyModel, float], one: float, other: float
) -> None:
    """Every draw from [0, 1), its ends included, gives a latency; a larger draw no smaller one."""
    low, high = (model[0].sample_s(u) for u in sorted((one, other)))
    assert model[1] <= low <= high < math.inf


def test_moments_of_the_models() -> None:
    """Means and medians are what the parameters say, floor included."""
    grid = [(index + 0.5) / 100_000 for index in range(100_000)]
    assert statistics.fmean(map(Exponential(0.1, 0.02).sample_s, grid)) == pytest.approx(0.1, rel=1e-3)
    assert Exponential(0.1).sample_s(0.5) == pytest.approx(0.1 * math.log(2))
    assert LogNormal(0.08, 0.7, floor_s=0.03).sample_s(0.5) == pytest.approx(0.08)
    # One standard deviation above the median: exp(sigma) times as much lies above the floor.
    one_sigma = statistics.NormalDist().cdf(1.0)
    assert LogNormal(0.08, 0.7, floor_s=0.03).sample_s(one_sigma) == pytest.approx(0.03 + 0.05 * math.exp(0.7))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(-1.0), "seconds.*-1.0"),
        (lambda: Constant(math.nan), "seconds.*nan"),
        (lambda: Exponential(0.1, floor_s=0.2), "mean_s.*floor_s = 0.2.*0.1"),
        (lambda: LogNormal(math.inf, 1.0), "median_s.*inf"),
        (lambda: LogNormal(0.1, -1.0), "sigma.*-1.0"),
        (lambda: HostOptions(up_bps=0.0), "up_bps.*0.0"),
        (lambda: HostOptions(down_bps=math.nan), "down_bps.*nan"),
        (lambda: HostOptions(extra_latency_s=-0.1), "extra_latency_s.*-0.1"),
        (lambda: Loss(probability=1.0), "probability.*1.0"),
        (lambda: Loss(retransmit_s=0.0), "retransmit_s.*0.0"),
        (lambda: Loss(max_retransmits=0), "max_retransmits.*0"),
        (lambda: Partition((frozenset("ab"), frozenset("bc"))), "two groups.*b"),
        (lambda: Partition(("ab",)), "set of host names.*'ab'"),
    ],
)
def test_wrong_values_are_named(make: object, message: str) -> None:
    """Each is refused on construction, with its field and itself."""
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_regions() -> None:
    """A pair of regions has its model, or that of the other direction; what is missing is named."""
    near, far, back = Constant(0.01), Constant(0.1), Constant(0.2)
    matrix = RegionMatrix(
        region_of={"a": "eu", "b": "eu", "c": "us", "d": "moon"},
        models={("eu", "eu"): near, ("eu", "us"): far, ("us", "moon"): far, ("moon", "us"): back},
    )
    assert matrix("a", "b") is near
    assert matrix("a", "c") is matrix("c", "a") is far
    assert matrix("d", "c") is back
    assert model_between(matrix, "c", "b") is far
    assert model_between(near, "c", "b") is near
    with pytest.raises(ValueError, match="between regions 'eu' and 'moon'"):
        matrix("a", "d")
    with pytest.raises(ValueError, match=r"'e' has no region; these have: a, b, c, d"):
        matrix("e", "a")


def test_streams_of_random_numbers_differ() -> None:
    """Every seed, pair, link and direction has a key of its own, whatever the names look like."""
    keys = {
        stream_key(seed, dialler, listener, number, is_answer=is_answer)
        for seed in (0, 1)
        for dialler, listener in (("a", "b"), ("b", "a"), ("a', 'b", "c"), ("a", "b', 'c"))
        for number in (1, 2)
        for is_answer in (False, True)
    }
    assert len(keys) == 32


def test_losses() -> None:
    """The share of parts lost k times falls with p^k, is bounded, and each loss doubles the wait."""
    loss = Loss(probability=0.3, retransmit_s=0.2, max_retransmits=3)
    counts = [0] * 6
    for sequence in range(20_000):
        counts[loss.num_losses(b"key", sequence)] += 1
    assert counts[5] == 0
    # Four attempts at most are lost: the last class holds all that is left.
    for count, share in zip(counts, (0.7, 0.21, 0.063, 0.0189, 0.0081), strict=False):
        assert count / 20_000 == pytest.approx(share, abs=4 * math.sqrt(share / 20_000))
    assert [loss.delay_s(0.05, lost) for lost in range(4)] == pytest.approx([0.0, 0.2, 0.6, 1.4])
    assert loss.delay_s(0.5, 2) == pytest.approx(3.0)  # a round trip of 1 s is longer than 0.2 s
    assert Loss().num_losses(b"key", 0) == 0


def test_a_line_passes_one_part_after_the_other() -> None:
    """1000 bytes at 8000 bits/s take a second; a part waits for those before it, and not for a pause."""
    line = Line(8000.0)
    assert [line.take(now, nbytes) for now, nbytes in ((10.0, 1000), (10.5, 500), (10.5, 0), (20.0, 1000))] == [
        11.0, 11.5, 11.5, 21.0,
    ]  # fmt: skip
    line.bandwidth_bps = math.inf
    assert line.take(20.5, 10**9) == 21.0  # behind what is on the line already
    assert line.take(22.0, 10**9) == 22.0


def test_who_reaches_whom() -> None:
    """Groups are apart, those in none are together, and the unplugged are alone."""
    reachability = Reachability()
    assert reachability.is_whole
    reachability.set_groups((frozenset("ab"), frozenset("c")))
    assert not reachability.is_whole
    together = {pair for pair in ("ab", "ac", "ad", "cd", "de") if reachability.between(*pair)}
    assert together == {"ab", "de"}
    reachability.set_plugged("e", False)
    assert not reachability.between("d", "e")
    assert not reachability.between("e", "d")
    reachability.set_groups(())
    assert not reachability.is_whole
    assert reachability.between("a", "c")
    reachability.set_plugged("e", True)
    assert reachability.is_whole
