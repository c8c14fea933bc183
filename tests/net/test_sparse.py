"""Sparse vectors on the wire: the bytes by hand, exactness, one form for each content, and whatever a peer sends."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.wire.sparse import (
    HEADER_BYTES,
    SparseBlocks,
    SparseCoding,
    SparseVector,
    all_gather_nbytes,
    all_reduce_nbytes,
    encode_sparse,
    mean_of_sparse,
    parse_sparse_untrusted,
    sparse_nbytes,
    to_dense,
)

DEFAULT = SparseCoding()
# Eight values a block, two of them kept, two bits each.
SMALL = SparseCoding(block_size=8, kept=2, bits=2)


def blocks(indices: Any, levels: Any, scales: Any) -> SparseBlocks:
    return SparseBlocks(np.array(indices), np.array(levels, np.int8), np.array(scales, np.float32))


SOME = blocks([[1, 2]], [[2, 3]], [0.5])


def one_segment(coding: SparseCoding, size: int, *parts: SparseBlocks) -> SparseVector:
    return SparseVector(coding=coding, sizes=(size,), parts=parts)


def random_vector(rng: np.random.Generator, coding: SparseCoding, sizes: tuple[int, ...]) -> SparseVector:
    """Entries in any order, some absent, some blocks empty."""
    parts = []
    for size in sizes:
        for group in coding.blocks(size):
            shape = (group.num_blocks, group.kept)
            indices = np.argsort(rng.random((group.num_blocks, group.length)), axis=1)[:, : group.kept]
            levels = rng.integers(2, coding.greatest_level + 1, shape) * rng.choice([-1, 0, 1], shape)
            levels[rng.random(group.num_blocks) < 0.2] = 0
            parts.append(blocks(indices, levels, rng.random(group.num_blocks) + 0.5))
    return SparseVector(coding=coding, sizes=sizes, parts=tuple(parts))


codings = st.builds(
    lambda size, share, bits: SparseCoding(block_size=size, kept=max(1, round(size * share)), bits=bits),
    st.integers(1, 70),
    st.floats(0, 1),
    st.sampled_from([2, 4]),
)
sizes_of = st.lists(st.integers(0, 200), max_size=4).map(tuple)


def test_a_payload_by_hand() -> None:
    """8 values, two kept: l = floor(log2(8 / 2)) = 2 low bits, 2 + (7 >> 2) = 3 high bits.

    Values 1.5 at 1 and -1.0 at 6 in units of 0.5: levels 3 and -2. Indices 1 = 0|01, 6 = 1|10: high bits 0 + 0 = 0 and
    1 + 1 = 2, so 0b101; low bits 01 and 10 from the lowest, 0b1001. Codes: 3 - 2 = 0b01, and 0b00 with the sign 0b10:
    0b1001. The scale 0.5 is 0x3f000000.
    """
    vector = one_segment(SMALL, 8, blocks([[6, 1]], [[-2, 3]], [0.5]))
    payload = encode_sparse(vector)
    assert bytes(payload).hex() == "44530102070001000000003f050909"
    read = parse_sparse_untrusted(payload, SMALL, (8,))
    assert to_dense(read).tolist() == [0, 1.5, 0, 0, 0, 0, -1.0, 0]
    assert read.parts[0].indices.tolist() == [[1, 6]]


def test_a_payload_of_four_bits_by_hand() -> None:
    """One value of a single one: no low bits, one high bit. Level -9 is 9 - 2 = 7 with the sign 8: 0xf. Scale 1.0."""
    coding = SparseCoding(block_size=1, kept=1, bits=4)
    payload = encode_sparse(one_segment(coding, 1, blocks([[0]], [[-9]], [1.0])))
    assert bytes(payload).hex() == "44530104000000000000803f010f"
    assert to_dense(parse_sparse_untrusted(payload, coding, (1,))).tolist() == [-9.0]


def test_an_empty_block_by_hand() -> None:
    """Levels of 0 are absent: no bit is set, and the scale is 0 whatever it was."""
    payload = encode_sparse(one_segment(SMALL, 8, blocks([[3, 3]], [[0, 0]], [0.5])))
    assert bytes(payload[HEADER_BYTES:]) == bytes(7)
    assert not to_dense(parse_sparse_untrusted(payload, SMALL, (8,))).any()


def test_ratio_to_float32() -> None:
    """4 + ceil((64 + 63) / 8) + 64 * 6 / 8 + 64 * 2 / 8 = 84 bytes a block, 16384 / 84 = 195.05: the bar is 100."""
    assert sparse_nbytes(DEFAULT, [4096]) - HEADER_BYTES == 4 + 16 + 48 + 16 == 84
    assert sparse_nbytes(SparseCoding(bits=4), [4096]) - HEADER_BYTES == 4 + 16 + 48 + 32 == 100
    million = 256 * 4096
    assert 4 * million / sparse_nbytes(DEFAULT, [million]) == pytest.approx(195.0, abs=0.1)


def test_traffic_of_a_group() -> None:
    """All-gather among 8: 7 payloads up and down. All-reduce in float32: 2 * 7 / 8 vectors. So 48.8 times less."""
    assert all_gather_nbytes(DEFAULT, [4096], 8) == 7 * (84 + 8)
    assert all_reduce_nbytes(4096, 8) == 28672
    large = 2**10 * 4096
    assert all_reduce_nbytes(large, 8) / all_gather_nbytes(DEFAULT, [large], 8) == pytest.approx(48.76, abs=0.01)


@settings(max_examples=200)
@given(codings, sizes_of, st.integers(0, 2**32 - 1))
def test_what_arrives_is_what_was_sent(coding: SparseCoding, sizes: tuple[int, ...], seed: int) -> None:
    """The same dense vector, by plain loops; the length is the one foretold; what was read has the same bytes."""
    vector = random_vector(np.random.default_rng(seed), coding, sizes)
    expected = np.zeros(sum(sizes), np.float32)
    parts, start = iter(vector.parts), 0
    for size in sizes:
        for group in coding.blocks(size):
            part = next(parts)
            for block in range(group.num_blocks):
                for index, level in zip(part.indices[block], part.levels[block], strict=True):
                    if level:
                        place = start + group.start + block * group.length + index
                        expected[place] = np.float32(level) * part.scales[block]
        start += size
    payload = encode_sparse(vector)
    assert payload.nbytes == sparse_nbytes(coding, sizes)
    read = parse_sparse_untrusted(payload, coding, sizes)
    assert to_dense(read).tobytes() == expected.tobytes()
    assert to_dense(vector).tobytes() == expected.tobytes()
    assert bytes(encode_sparse(read)) == bytes(payload)


def test_many_tiles() -> None:
    """More blocks than are worked on together, and a short one behind them."""
    coding, sizes = SparseCoding(block_size=64, kept=3, bits=4), (600 * 64 + 5,)
    vector = random_vector(np.random.default_rng(0), coding, sizes)
    read = parse_sparse_untrusted(encode_sparse(vector), coding, sizes)
    assert to_dense(read).tobytes() == to_dense(vector).tobytes()
    assert np.count_nonzero(to_dense(read)) == sum(np.count_nonzero(part.levels) for part in vector.parts)


@settings(max_examples=300)
@given(codings, sizes_of, st.data())
def test_garbage_raises_only_the_one_error(coding: SparseCoding, sizes: tuple[int, ...], data: st.DataObject) -> None:
    """Bytes of the right length, under the right head or not; what is accepted has no other form."""
    length = sparse_nbytes(coding, sizes)
    garbage = data.draw(st.binary(min_size=length, max_size=length))
    head = bytes(encode_sparse(random_vector(np.random.default_rng(0), coding, sizes)))[:HEADER_BYTES]
    for payload in (garbage, head + garbage[HEADER_BYTES:]):
        try:
            read = parse_sparse_untrusted(memoryview(payload), coding, sizes)
        except RemoteProtocolError:
            continue
        assert bytes(encode_sparse(read)) == payload
        assert np.isfinite(to_dense(read)).all()


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1), st.data())
def test_one_flipped_bit(seed: int, data: st.DataObject) -> None:
    """It is refused, or is another content in its own one form."""
    coding, sizes = SparseCoding(block_size=33, kept=5, bits=2), (70, 4)
    payload = bytearray(encode_sparse(random_vector(np.random.default_rng(seed), coding, sizes)))
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    payload[bit // 8] ^= 1 << bit % 8
    try:
        read = parse_sparse_untrusted(memoryview(payload), coding, sizes)
    except RemoteProtocolError:
        return
    assert bytes(encode_sparse(read)) == payload


# Behind the head: scale 0.5, high 0b101, low 0b1001, codes 0b1001; see the payload by hand.
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0000003f 05 09 09 00", "takes 15 bytes, got 16"),
        ("0000003f 05 09", "takes 15 bytes, got 14"),
        ("000000bf 05 09 09", "negative or not finite"),
        ("00000080 00 00 00", "negative or not finite"),
        ("0000c07f 05 09 09", "negative or not finite"),
        ("0000807f 05 09 09", "negative or not finite"),
        ("ffff7f7f 05 09 09", "negative or not finite"),  # finite itself, but not three times
        ("00000000 05 09 09", "a scale of 0 for values"),
        ("0000003f 00 00 00", "or another for none"),
        ("0000003f 07 09 09", "more than 2 values"),
        ("0000003f 0d 09 09", "more than 2 values|bits set behind the indices"),
        ("0000003f 15 09 09", "bits set behind the indices"),
        ("0000003f 05 19 09", "bits set behind the values"),
        ("0000003f 05 09 19", "bits set behind the values"),
        ("0000003f 03 05 09", "do not rise"),  # both 0|01
        ("0000003f 03 01 09", "do not rise"),  # 0|01, then 0|00
        ("0000003f 01 09 01", "left over and not zero"),
        ("0000003f 01 01 05", "left over and not zero"),
    ],
)
def test_malformed_rows(row: str, message: str) -> None:
    payload = bytes.fromhex("4453 01 02 0700 0100" + row)
    with pytest.raises(RemoteProtocolError, match=message):
        parse_sparse_untrusted(memoryview(payload), SMALL, (8,))


def test_an_index_outside_its_block() -> None:
    """Blocks of 5 with 2 kept have l = 1 low bit and 2 + (4 >> 1) = 4 high bits: 2|1 = 5 can be written."""
    coding = SparseCoding(block_size=5, kept=2, bits=2)
    good = bytes.fromhex("4453 01 02 0400 01000000003f 05 00 00")  # 0|0 and 1|0
    assert to_dense(parse_sparse_untrusted(memoryview(good), coding, (5,))).tolist() == [1, 0, 1, 0, 0]
    bad = bytes.fromhex("4453 01 02 0400 01000000003f 09 02 00")  # 0|0 and 2|1
    with pytest.raises(RemoteProtocolError, match="an index outside a block of 5"):
        parse_sparse_untrusted(memoryview(bad), coding, (5,))


@pytest.mark.parametrize("head", ["4454 01 02 0700 0100", "4453 02 02 0700 0100", "4453 01 04 0700 0100"])
def test_another_head(head: str) -> None:
    payload = bytes.fromhex(head + "0000003f 05 09 09")
    with pytest.raises(RemoteProtocolError, match="must be 4453010207000100, got " + head.replace(" ", "")):
        parse_sparse_untrusted(memoryview(payload), SMALL, (8,))


def test_memory_is_bounded() -> None:
    """Parsing takes 5 bytes a kept value and 4 a block, and some MiB for a tile: here 16 MiB dense, below 4 MiB."""
    sizes = (1024 * 4096,)
    payload = encode_sparse(random_vector(np.random.default_rng(0), DEFAULT, sizes))
    tracemalloc.start()
    parse_sparse_untrusted(payload, DEFAULT, sizes)
    peak = tracemalloc.get_traced_memory()[1]
    for _ in range(2):  # the first time imports and caches take some
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(RemoteProtocolError):
            parse_sparse_untrusted(payload, DEFAULT, (2**39,))
        refused = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < 4 * 2**20
    assert refused < 2**16


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (blocks([[1, 1]], [[2, 3]], [0.5]), "indices must differ"),
        (blocks([[1, 8]], [[2, 3]], [0.5]), "from 0 to 7"),
        (blocks([[-1, 2]], [[2, 3]], [0.5]), "from 0 to 7"),
        (blocks([[1, 2]], [[1, 3]], [0.5]), "of magnitude 2 to 3, got 1 to 3"),
        (blocks([[1, 2]], [[2, -4]], [0.5]), "of magnitude 2 to 3, got -4 to 2"),
        (blocks([[1, 2]], [[2, 3]], [np.nan]), "finite and at least 0, got nan"),
        (blocks([[1, 2]], [[2, 3]], [-1.0]), "finite and at least 0, got -1.0"),
        (blocks([[1, 2]], [[2, 3]], [2e38]), "finite and at least 0"),
        (blocks([[1]], [[2]], [0.5]), r"expected indices and levels \(1, 2\), got \(1, 1\)"),
    ],
)
def test_what_cannot_be_sent(part: SparseBlocks, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_sparse(one_segment(SMALL, 8, part))


def test_parts_must_be_complete() -> None:
    with pytest.raises(ValueError, match="have 2 parts, got 1"):
        encode_sparse(one_segment(SMALL, 9, SOME))


def test_wrong_codings() -> None:
    bounds = {"block_size": "from 1 to 65536", "kept": "from 1 to the block size 4096", "bits": "2 or 4"}
    for name, value in (("block_size", 0), ("block_size", 2**16 + 1), ("kept", 0), ("kept", 4097), ("bits", 3)):
        with pytest.raises(ValueError, match=f"{name} must be {bounds[name]}, got {value}"):
            SparseCoding(**{name: value})


def test_mean_by_hand() -> None:
    """(1 * [0, 1, 0, -1.5] + 3 * [2, 1.5, 0, 0]) / 4, the second scale 0.5."""
    coding = SparseCoding(block_size=4, kept=2, bits=4)
    first = one_segment(coding, 4, blocks([[1, 3]], [[2, -3]], [0.5]))
    second = one_segment(coding, 4, blocks([[1, 0]], [[3, 4]], [0.5]))
    assert mean_of_sparse([first, second], [1, 3]).tolist() == [1.5, 1.375, 0.0, -0.375]


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_mean_is_that_of_the_dense_vectors(seed: int, members: int) -> None:
    """Any number of members, weights with zeros among them, several segments."""
    rng = np.random.default_rng(seed)
    vectors = [random_vector(rng, SMALL, (20, 0, 3)) for _ in range(members)]
    weights = [*rng.integers(0, 3, members - 1).tolist(), 1.0]
    dense = np.stack([to_dense(vector).astype(np.float64) for vector in vectors])
    assert np.allclose(mean_of_sparse(vectors, weights), np.average(dense, axis=0, weights=weights), rtol=1e-6, atol=0)


def test_what_has_no_mean() -> None:
    """Weights that are not one for each, none above 0, or not finite; vectors of different sizes."""
    wrong = [([], "got 2 and 0"), ([1.0, -1.0], "at least 0"), ([0.0, 0.0], "not all 0")]
    for weights, message in (*wrong, ([1.0, np.nan], "at least 0"), ([1.0, np.inf], "finite")):
        with pytest.raises(ValueError, match=message):
            mean_of_sparse([one_segment(SMALL, 8, SOME)] * 2, weights)
    with pytest.raises(ValueError, match="vectors differ"):
        mean_of_sparse([one_segment(SMALL, size, SOME) for size in (8, 7)], [1, 1])
