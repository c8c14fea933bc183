"""One part on its way to the mean: its chunks and their names, who is waited for, who is out, and what comes of it."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmoe_net.averaging.grouping.group import Group, Member, Role
from dmoe_net.averaging.reduction.partition import (
    MAX_WEIGHT,
    MAX_WINDOW,
    AllReduceConfig,
    ChunkName,
    Part,
    parse_name_untrusted,
    parts_of,
)
from dmoe_net.averaging.reduction.reducer import PartReduction, is_finite, mean_into
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Address, PeerId
from dmoe_net.types import Array
from dmoe_net.wire.codec import decode_untrusted, encode
from dmoe_net.wire.compression import Compression
from tests.net.all_reduce_swarm import vectors

T = 5.0
CONFIG = AllReduceConfig(sender_timeout_s=T)


class Bench:
    """Members 0 to 3 bring a part of six numbers in three chunks; member 0 reduces it, and has a vector too."""

    def __init__(self, count: int = 4, *, own: bool = True, weights: dict[int, float] | None = None) -> None:
        self.part = Part(start=0, end=6, chunk_size=2)
        self.vectors = vectors(count, 6)
        self.average = np.full(6, np.nan, np.float32)
        weights = weights or dict.fromkeys(range(0 if own else 1, count), 1.0)
        mine = (0, self.vectors[0]) if own else None
        self.reduction = PartReduction(self.part, weights, own=mine, average=self.average, config=CONFIG, now=0.0)

    def bring(self, chunk: int, *senders: int, now: float = 0.0) -> None:
        """Senders' own values."""
        for sender in senders:
            self.reduction.receive_untrusted(sender, chunk, [self.vectors[sender][self.part.chunk(chunk)]], now)

    def finished(self) -> list[int]:
        """The chunks that are finished anew; their means are in their places."""
        chunks = []
        for chunk, mean in self.reduction.take_finished():
            assert np.array_equal(mean, self.average[self.part.chunk(chunk)])
            chunks.append(chunk)
        return chunks

    def mean(self, chunk: int, *senders: int) -> Array:
        """Mean of these senders' values of a chunk, as it should come out."""
        where = self.part.chunk(chunk)
        return np.mean([self.vectors[sender][where].astype(np.float64) for sender in senders], axis=0)


def test_a_chunk_is_finished_by_the_last_who_brings_it() -> None:
    """Chunks may be finished in any order; each once, with the mean in its place."""
    bench = Bench()
    for sender in (1, 2, 3):
        assert bench.reduction.num_senders[1] is None
        bench.bring(1, sender)
    assert bench.finished() == [1]
    assert bench.finished() == []
    assert bench.reduction.num_senders[1] == 4
    np.testing.assert_allclose(bench.average[2:4], bench.mean(1, 0, 1, 2, 3), rtol=1e-6)
    assert np.isnan(bench.average[:2]).all()
    assert not bench.reduction.is_done
    for chunk in (0, 2):
        bench.bring(chunk, 3, 2, 1)
    assert bench.reduction.is_done
    assert bench.finished() == [0, 2]
    assert bench.reduction.deadline() == math.inf


@given(order=st.permutations(list(itertools.product(range(3), (1, 2, 3)))))
def test_the_order_of_arrival_changes_not_a_single_bit(order: list[tuple[int, int]]) -> None:
    bench, expected = Bench(), Bench()
    for chunk, sender in order:
        bench.bring(chunk, sender)
    for chunk in range(3):
        expected.bring(chunk, 1, 2, 3)
    assert np.array_equal(bench.average, expected.average)


def test_weights() -> None:
    bench = Bench(weights={0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0})
    bench.bring(0, 1, 2, 3)
    stacked = np.stack([vector[:2] for vector in bench.vectors]).astype(np.float64)
    np.testing.assert_allclose(bench.average[:2], np.array([0.1, 0.2, 0.3, 0.4]) @ stacked, rtol=1e-6)


def test_what_is_lost_on_the_way_is_lost_to_all_alike() -> None:
    """float16 rounds our 2049 to 2048, which counts; the mean 2052 of it and 2056 adds 4 to our 2049."""
    average, own, other = np.empty(1, np.float32), np.float32([2049]), np.float32([2056])
    part, config = Part(start=0, end=1, chunk_size=1), replace(CONFIG, compression=Compression.FLOAT16)
    reduction = PartReduction(part, {0: 1, 1: 1}, own=(0, own), average=average, config=config, now=0.0)
    reduction.receive_untrusted(1, 0, [other], 0.0)
    assert [(chunk, mean.tolist()) for chunk, mean in reduction.take_finished()] == [(0, [2052.0])]
    assert average.tolist() == [2053.0]


def test_who_keeps_the_frontier_waiting_is_out() -> None:
    """After the timeout and not before; what it brought to later chunks is forgotten, others' is not."""
    bench = Bench()
    bench.bring(0, 1, 2)
    bench.bring(1, 3)
    assert bench.reduction.deadline() == T
    bench.reduction.tick(T - 0.01)
    assert bench.reduction.lost == []
    bench.reduction.tick(T)
    assert bench.reduction.lost == [3]
    assert bench.reduction.num_senders[0] == 3
    np.testing.assert_allclose(bench.average[:2], bench.mean(0, 0, 1, 2), rtol=1e-6)
    assert bench.reduction.deadline() == 2 * T
    bench.bring(1, 1, 2, now=T)
    np.testing.assert_allclose(bench.average[2:4], bench.mean(1, 0, 1, 2), rtol=1e-6)
    with pytest.raises(RemoteProtocolError, match="too late"):
        bench.bring(2, 3, now=T)


def test_the_clock_runs_for_the_frontier_alone() -> None:
    """Chunk 1 was brought late, but it became the frontier later still."""
    bench = Bench(2)
    bench.bring(0, 1, now=T - 1)
    assert bench.reduction.deadline() == 2 * T - 1
    bench.reduction.tick(T + 1)
    assert bench.reduction.lost == []
    bench.bring(1, 1, now=T + 1)
    assert bench.reduction.deadline() == 2 * T + 1


@pytest.mark.parametrize("others", [[], [1, 2, 3]])
def test_all_out_leaves_the_own_values(others: list[int]) -> None:
    """With nobody else left everything is finished at once; one alone is done before it begins."""
    bench = Bench(1 + len(others))
    assert bench.reduction.is_done == (not others)
    bench.reduction.tick(T)
    assert bench.reduction.is_done
    assert bench.reduction.lost == others
    assert np.array_equal(bench.average, bench.vectors[0])


def test_nobody_left_at_all() -> None:
    """A reducer without a vector, forsaken: no mean, and nothing is waited for."""
    bench = Bench(own=False)
    bench.bring(0, 1)
    for sender in (1, 2, 3):
        bench.reduction.drop(sender, 1.0)
    assert bench.reduction.is_done
    assert bench.reduction.num_senders == [0, 0, 0]
    assert np.isnan(bench.average).all()


def test_a_dropped_sender_is_missed_by_nobody() -> None:
    """Chunks that waited for it alone are finished; dropping it again, or a stranger, changes nothing."""
    bench = Bench()
    bench.bring(0, 1, 2)
    for _ in range(2):
        bench.reduction.drop(3, 1.0)
        bench.reduction.drop(99, 1.0)
    assert bench.finished() == [0]
    assert bench.reduction.lost == [3]


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([np.zeros(3, np.float32)], "of 2 numbers"),
        ([np.zeros((2, 1), np.float32)], "of 2 numbers"),
        ([np.zeros(2, np.float64)], "float32"),
        ([np.array([1, np.nan], np.float32)], "not finite"),
        ([np.array([np.inf, 1], np.float32)], "not finite"),
        ([], "expected one float32 tensor"),
        ([np.zeros(2, np.float32)] * 2, "expected one float32 tensor"),
    ],
)
def test_bad_values_end_their_sender(tensors: list[np.ndarray], reason: str) -> None:
    bench = Bench()
    with pytest.raises(RemoteProtocolError, match=reason):
        bench.reduction.receive_untrusted(1, 0, tensors, 0.0)
    assert bench.reduction.lost == [1]
    bench.bring(0, 2, 3)
    np.testing.assert_allclose(bench.average[:2], bench.mean(0, 0, 2, 3), rtol=1e-6)


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_chunk_that_comes_twice_is_refused(is_finished: bool) -> None:
    """The first counts, whether it has been averaged yet or not, and its sender stays."""
    bench = Bench()
    bench.bring(0, *((1, 2, 3) if is_finished else (1,)))
    with pytest.raises(RemoteProtocolError, match="came before"):
        bench.reduction.receive_untrusted(1, 0, [np.zeros(2, np.float32)], 0.0)
    assert bench.reduction.lost == []
    if not is_finished:
        bench.bring(0, 2, 3)
    np.testing.assert_allclose(bench.average[:2], bench.mean(0, 0, 1, 2, 3), rtol=1e-6)


def test_strangers_and_ourselves_bring_nothing() -> None:
    bench = Bench()
    for sender in (0, 7):
        with pytest.raises(RemoteProtocolError, match="nothing is expected"):
            bench.reduction.receive_untrusted(sender, 0, [np.zeros(2, np.float32)], 0.0)


def test_what_one_sender_can_make_us_hold_is_bounded() -> None:
    """`MAX_WINDOW` chunks ahead of the answers are fine, one more ends it, and what it brought is let go."""
    part = Part(start=0, end=100, chunk_size=1)
    average = np.zeros(100, np.float32)
    reduction = PartReduction(part, {0: 1, 1: 1}, own=None, average=average, config=CONFIG, now=0.0)
    for chunk in range(MAX_WINDOW):
        reduction.receive_untrusted(1, chunk, [average[:1]], 0.0)
    with pytest.raises(RemoteProtocolError, match="ahead of the answers"):
        reduction.receive_untrusted(1, MAX_WINDOW, [average[:1]], 0.0)
    assert reduction.lost == [1]
    assert not any(reduction._arrived.values())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_mean_over_several_tiles(count: int) -> None:
    """It is that of float64, at a size that is no multiple of anything; equal vectors stay what they are."""
    values = vectors(count, 150_001)
    out = np.empty(150_001, np.float32)
    mean_into(out, values, [1.0] * count)
    np.testing.assert_allclose(out, np.mean(np.stack(values).astype(np.float64), axis=0), rtol=1e-5, atol=1e-6)
    mean_into(out, [values[0]] * count, [0.3] * count)
    np.testing.assert_allclose(out, values[0], rtol=2e-7)


def test_extreme_weights() -> None:
    out, one, two = np.empty(2, np.float32), np.ones(2, np.float32), np.full(2, 2, np.float32)
    mean_into(out, [one, two], [1e300, 1e300])
    assert out.tolist() == [1.5, 1.5]
    mean_into(out, [one, two], [1e-300, 1e300])
    assert out.tolist() == [2.0, 2.0]


def test_sums_beyond_float32_are_told_not_hidden() -> None:
    """The mean is infinite, without a warning, and whoever gets it refuses it; large finite values are finite."""
    large, out = np.full(3, 3e38, np.float32), np.empty(3, np.float32)
    mean_into(out, [large, large], [1.0, 1.0])
    assert np.isinf(out).all()
    assert not is_finite(out)
    assert is_finite(large)
    assert is_finite(-large)
    assert not is_finite(np.array([np.inf, -np.inf], np.float32))


NAME = ChunkName(group_id=b"g" * 16, size=100, start=8, wish=3, weight=2.5)


def test_chunks_of_a_part() -> None:
    part = Part(start=10, end=20, chunk_size=4)
    assert [part.chunk(index) for index in range(part.num_chunks)] == [slice(10, 14), slice(14, 18), slice(18, 20)]
    assert [part.index_untrusted(start) for start in (10, 14, 18)] == [0, 1, 2]
    for start in (0, 6, 9, 11, 19, 20, 22, 10**30):
        with pytest.raises(RemoteProtocolError, match="no chunk begins"):
            part.index_untrusted(start)
    empty = Part(start=10, end=10, chunk_size=4)
    assert empty.num_chunks == 0
    with pytest.raises(RemoteProtocolError):
        empty.index_untrusted(10)


@given(size=st.integers(0, 200), count=st.integers(1, 9), chunk_size=st.integers(1, 30))
def test_chunks_of_all_parts_cover_the_vector_once(size: int, count: int, chunk_size: int) -> None:
    rng = random.Random(0)
    members = [Member(peer_id=PeerId.draw(rng), address=Address("a", 1), wanted_slot=slot) for slot in range(count)]
    members.append(Member(peer_id=PeerId.draw(rng), address=None, role=Role.CLIENT))
    group = Group(group_id=bytes(16), members=tuple(members), side=count)
    covered = [
        number
        for part in parts_of(group, size, chunk_size=chunk_size)
        for index in range(part.num_chunks)
        for number in range(*part.chunk(index).indices(size))
    ]
    assert sorted(covered) == list(range(size))


def test_names_survive_the_wire() -> None:
    assert parse_name_untrusted(decode_untrusted(encode(dict(NAME.body())))) == NAME


@pytest.mark.parametrize(
    "changes",
    [
        *({"group": b"short"}, {"group": "g" * 16}, {"group": None}, {"size": -1}, {"size": True}, {"start": 1.0}),
        *({"wish": None}, {"wish": -1}, {"weight": -1.0}, {"weight": float("inf")}, {"weight": 2 * MAX_WEIGHT}),
        *({"weight": 1}, {"weight": True}, {"weight": "1"}, {"weight": [1.0]}),
    ],
)
def test_names_that_are_none(changes: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_name_untrusted({**NAME.body(), **changes})
