"""Tensors as raw buffers: aligned, read-only, copied nowhere, and nothing that a forged table could break."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from net.errors import LocalProtocolError, RemoteProtocolError
from net.wire.tensors import (
    ALIGNMENT,
    DTYPES,
    MAX_RANK,
    MAX_TENSORS,
    Tensor,
    aligned_buffer,
    body_nbytes_untrusted,
    buffers_of,
    describe,
    view_untrusted,
)


def travel(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Through the table and an aligned body, as on the wire."""
    content = b"".join(buffers_of(tensors))
    body = aligned_buffer(len(content))
    body[:] = content
    return view_untrusted(describe(tensors), body)


def random_tensors() -> st.SearchStrategy[Tensor]:
    """Arrays of every dtype with any bits in them, up to rank 4, some of them without elements."""

    def fill(dtype: np.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
        bits = np.random.default_rng(seed).bytes(int(np.prod(shape)) * dtype.itemsize)
        if dtype.name == "bool":
            bits = bytes(byte & 1 for byte in bits)
        return np.frombuffer(bits, dtype).reshape(shape)

    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
    return st.builds(fill, st.sampled_from(list(DTYPES.values())), shapes, st.integers(0, 2**32))


@settings(max_examples=150, deadline=None)
@given(st.lists(random_tensors(), max_size=5))
def test_round_trip_keeps_every_bit(tensors: list[Tensor]) -> None:
    """Dtype, shape and all bits (NaN payloads too) arrive; every tensor is aligned and read-only."""
    arrived = travel(*tensors)
    assert len(arrived) == len(tensors)
    for sent, got in zip(tensors, arrived, strict=True):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert got.tobytes() == sent.tobytes()
        assert not got.flags.writeable
        assert got.flags.c_contiguous
        assert got.size == 0 or got.ctypes.data % ALIGNMENT == 0


def test_layout_by_hand() -> None:
    """Three bytes, a gap to 64, four bytes, nothing after; a tensor without elements takes no room."""
    tensors = (np.array([1, 2, 3], np.uint8), np.zeros((0, 7), np.float64), np.array([-1], np.int32))
    assert describe(tensors) == [["uint8", [3]], ["float64", [0, 7]], ["int32", [1]]]
    assert b"".join(buffers_of(tensors)) == b"\x01\x02\x03" + bytes(61) + b"\xff\xff\xff\xff"
    assert body_nbytes_untrusted(describe(tensors)) == 68


def test_bfloat16_by_hand() -> None:
    """bfloat16 is the upper half of float32: 1.0 = 0x3f80, -2.0 = 0xc000, little-endian."""
    tensor = np.array([1.0, -2.0], ml_dtypes.bfloat16)
    assert describe([tensor]) == [["bfloat16", [2]]]
    assert b"".join(buffers_of([tensor])) == bytes.fromhex("803f00c0")
    (arrived,) = travel(tensor)
    assert arrived.dtype == ml_dtypes.bfloat16
    assert arrived.astype(np.float32).tolist() == [1.0, -2.0]


def test_sending_copies_nothing() -> None:
    """The buffer that is sent is the tensor's own memory."""
    tensor = np.arange(1000, dtype=np.float32)
    (buffer,) = buffers_of([tensor])
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), tensor)


def test_receiving_copies_nothing() -> None:
    """The tensors view the body."""
    body = aligned_buffer(4000)
    (view,) = view_untrusted([["float32", [1000]]], body)
    body[:4] = np.float32(7.5).tobytes()  # only this test may: nobody else writes to a body twice
    assert view[0] == 7.5


@pytest.mark.parametrize(
    "tensor",
    [
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
        np.arange(12, dtype=np.float32)[::-2],
        np.arange(5, dtype=">i4"),
        np.broadcast_to(np.float64(2.5), (2, 3)),
        np.array(3, np.int8),
    ],
    ids=["transposed", "strided", "big-endian", "broadcast", "scalar"],
)
def test_unusual_arrays_arrive_with_the_same_values(tensor: Tensor) -> None:
    """Arrays that are not C-contiguous and little-endian are put in order first; rank 0 stays rank 0."""
    (arrived,) = travel(tensor)
    assert arrived.shape == tensor.shape
    assert np.array_equal(arrived, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        np.zeros(2, np.complex64),
        np.array(["a"]),
        np.array([object()]),
        np.zeros(2, "M8[s]"),
        np.zeros(2, [("a", "i4")]),
        np.zeros(2, ml_dtypes.float8_e4m3fn),
        np.zeros((1,) * (MAX_RANK + 1)),
        [1.0, 2.0],
        np.float32(1),
    ],
    ids=lambda tensor: str(getattr(tensor, "dtype", type(tensor).__name__)),
)
def test_other_tensors_are_refused_locally(tensor: Tensor) -> None:
    """What cannot be sent is a LocalProtocolError before anything leaves."""
    with pytest.raises(LocalProtocolError):
        describe([tensor])


def test_number_of_tensors_is_bounded() -> None:
    """MAX_TENSORS pass, one more does not, in either direction."""
    tensors = [np.zeros(1, np.int8)] * MAX_TENSORS
    assert len(travel(*tensors)) == MAX_TENSORS
    with pytest.raises(LocalProtocolError):
        describe([*tensors, tensors[0]])
    with pytest.raises(RemoteProtocolError):
        body_nbytes_untrusted([["int8", [1]]] * (MAX_TENSORS + 1))


@pytest.mark.parametrize(
    "table",
    [
        None,
        {},
        "int8",
        [None],
        [[]],
        [["int8"]],
        [["int8", [1], 0]],
        [["int8", 1]],
        [[8, [1]]],
        [["complex64", [1]]],
        [["object", [1]]],
        [["int8", [-1]]],
        [["int8", [True]]],
        [["int8", [1.0]]],
        [["int8", ["1"]]],
        [["int8", [2**64 - 1]]],
        [["int8", [2**62, 0]]],
        [["int64", [2**20] * 8]],
        [["int8", [2**40]], ["int8", [1]]],
        [["int8", [1] * (MAX_RANK + 1)]],
    ],
    ids=repr,
)
def test_forged_tables_are_refused(table: object) -> None:
    """Malformed rows and negative, huge or overflowing shapes are RemoteProtocolErrors."""
    with pytest.raises(RemoteProtocolError):
        body_nbytes_untrusted(table)
    with pytest.raises(RemoteProtocolError):
        view_untrusted(table, aligned_buffer(1))


@pytest.mark.parametrize("nbytes", [0, 3, 5, 64])
def test_body_must_have_exactly_the_described_length(nbytes: int) -> None:
    """A body that is shorter or longer than its table says is refused."""
    with pytest.raises(RemoteProtocolError, match="describes 4 bytes"):
        view_untrusted([["int32", [1]]], aligned_buffer(nbytes))


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 100_000])
def test_aligned_buffers(nbytes: int) -> None:
    """A buffer has the length asked for and starts on a multiple of 64."""
    buffer = aligned_buffer(nbytes)
    assert (buffer.nbytes, buffer.readonly, buffer.format) == (nbytes, False, "B")
    assert nbytes == 0 or np.frombuffer(buffer, np.uint8).ctypes.data % ALIGNMENT == 0
