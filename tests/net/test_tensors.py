"""Tensors as raw buffers: aligned, read-only, copied nowhere, and nothing that a forged table could break."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dmoe_net.errors import LocalProtocolError, RemoteProtocolError
from dmoe_net.wire.compression import Compressed, Compression, encode, encoded_nbytes
from dmoe_net.wire.tensors import (
    ALIGNMENT,
    DTYPES,
    MAX_DECODED_BYTES,
    MAX_RANK,
    MAX_TENSORS,
    Outgoing,
    Tensor,
    aligned_buffer,
    as_outgoing,
    as_received,
    buffers_of,
    describe,
    layout_untrusted,
    plain,
    views_untrusted,
)

KINDS = [kind for kind in Compression if kind is not Compression.NONE]


def travel(*tensors: Outgoing) -> tuple[Tensor, ...]:
    """Through the table and an aligned body, as on the wire."""
    return views_untrusted(layout_untrusted(describe(tensors)), body_of(b"".join(buffers_of(tensors))))


def body_of(content: bytes) -> memoryview:
    """These bytes as they are received."""
    body = aligned_buffer(len(content))
    body[:] = content
    return body


def random_tensors() -> st.SearchStrategy[Tensor]:
    """Arrays of every dtype with any bits in them, up to rank 4, some of them without elements."""

    def fill(dtype: np.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
        bits = np.random.default_rng(seed).bytes(int(np.prod(shape)) * dtype.itemsize)
        if dtype.name == "bool":
            bits = bytes(byte & 1 for byte in bits)
        return np.frombuffer(bits, dtype).reshape(shape)

    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
    return st.builds(fill, st.sampled_from(list(DTYPES.values())), shapes, st.integers(0, 2**32))


def test_layout_by_hand() -> None:
    """Three bytes, a gap to 64, four bytes, nothing after; a tensor without elements takes no room."""
    tensors = (np.array([1, 2, 3], np.uint8), np.zeros((0, 7), np.float64), np.array([-1], np.int32))
    assert describe(tensors) == [["uint8", [3]], ["float64", [0, 7]], ["int32", [1]]]
    assert b"".join(buffers_of(tensors)) == b"\x01\x02\x03" + bytes(61) + b"\xff\xff\xff\xff"
    assert layout_untrusted(describe(tensors)).nbytes == 68


def test_bfloat16_by_hand() -> None:
    """bfloat16 is the upper half of float32: 1.0 = 0x3f80, -2.0 = 0xc000, little-endian."""
    tensor = np.array([1.0, -2.0], ml_dtypes.bfloat16)
    assert describe([tensor]) == [["bfloat16", [2]]]
    assert b"".join(buffers_of([tensor])) == bytes.fromhex("803f00c0")
    (arrived,) = travel(tensor)
    assert arrived.dtype == ml_dtypes.bfloat16
    assert arrived.astype(np.float32).tolist() == [1.0, -2.0]


def test_neither_end_copies() -> None:
    """The buffer that is sent is the tensor's own memory, and tensors that are received view the body."""
    tensor = np.arange(1000, dtype=np.float32)
    (buffer,) = buffers_of([tensor])
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), tensor)
    body = aligned_buffer(4000)
    (view,) = views_untrusted(layout_untrusted([["float32", [1000]]]), body)
    body[:4] = np.float32(7.5).tobytes()  # only this test may: nobody else writes to a body twice
    assert view[0] == 7.5


def test_other_tensors_are_refused_locally() -> None:
    dtypes = [np.complex64, "U1", object, "M8[s]", [("a", "i4")], ml_dtypes.float8_e4m3fn]
    others = [*(np.zeros(2, dtype) for dtype in dtypes), np.zeros((1,) * (MAX_RANK + 1)), [1.0, 2.0], np.float32(1)]
    for tensor in others:
        with pytest.raises(LocalProtocolError):
            describe([tensor])


def test_number_of_tensors_is_bounded() -> None:
    tensors = [np.zeros(1, np.int8)] * MAX_TENSORS
    assert len(travel(*tensors)) == MAX_TENSORS
    with pytest.raises(LocalProtocolError):
        describe([*tensors, tensors[0]])
    with pytest.raises(RemoteProtocolError):
        layout_untrusted([["int8", [1]]] * (MAX_TENSORS + 1))


FORGED: list[object] = [None, {}, "int8", [None], [[]], [["int8"]], [["int8", [1], 0]], [["int8", [1], "float16"]]]
FORGED += [[["float32", [1], wrong]] for wrong in ("none", "", "zstd", "FLOAT16", None, ["float16"])]
FORGED += [[["float32", [1], "float16", 0]], [["float64", [1], "float16"]], [["bfloat16", [1], "blockwise8"]]]
FORGED += [[["float32", [-1], "blockwise8"]], [["float32", [2**40] * 8, "blockwise8"]]]
FORGED += [[["int8", 1]], [[8, [1]]], [["complex64", [1]]], [["object", [1]]]]
FORGED += [[["int8", [wrong]]] for wrong in (-1, True, 1.0, "1", 2**64 - 1)]
FORGED += [[["int8", [2**62, 0]]], [["int64", [2**20] * 8]], [["int8", [2**40]], ["int8", [1]]]]
FORGED += [[["int8", [1] * (MAX_RANK + 1)]]]


@pytest.mark.parametrize("table", FORGED, ids=repr)
def test_forged_tables_are_refused(table: object) -> None:
    with pytest.raises(RemoteProtocolError):
        layout_untrusted(table)


@pytest.mark.parametrize("nbytes", [0, 3, 5, 64])
def test_body_must_have_exactly_the_described_length(nbytes: int) -> None:
    with pytest.raises(RemoteProtocolError, match="describes 4 bytes"):
        views_untrusted(layout_untrusted([["int32", [1]]]), aligned_buffer(nbytes))


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 100_000])
def test_aligned_buffers(nbytes: int) -> None:
    buffer = aligned_buffer(nbytes)
    assert (buffer.nbytes, buffer.readonly, buffer.format) == (nbytes, False, "B")
    assert nbytes == 0 or np.frombuffer(buffer, np.uint8).ctypes.data % ALIGNMENT == 0


def outgoing_tensors() -> st.SearchStrategy[Outgoing]:
    """Tensors as they are, and float32 ones that ask for each compression, some without elements."""

    def wrap(kind: Compression, shape: tuple[int, ...], seed: int) -> Outgoing:
        return Compressed(np.random.default_rng(seed).normal(size=shape).astype(np.float32), kind)

    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)
    return random_tensors() | st.builds(wrap, st.sampled_from(KINDS), shapes, st.integers(0, 2**32))


@settings(max_examples=300)
@given(st.lists(outgoing_tensors(), max_size=5))
def test_tensors_arrive_as_they_were(tensors: list[Outgoing]) -> None:
    """Dtype, shape and all bits (NaN payloads too) of plain tensors arrive, and of compressed ones the values that
    `as_received` gives; all are aligned and read-only."""
    arrived = travel(*tensors)
    assert len(arrived) == len(tensors)
    for outgoing, got in zip(tensors, arrived, strict=True):
        foretold = as_received(outgoing)
        for tensor in (got, foretold):
            assert (tensor.dtype, tensor.shape) == (plain(outgoing).dtype, plain(outgoing).shape)
            assert (tensor.flags.c_contiguous, tensor.flags.writeable) == (True, False)
        for tensor in (got, foretold) if isinstance(outgoing, Compressed) else (got,):
            assert tensor.size == 0 or tensor.ctypes.data % ALIGNMENT == 0
        assert got.tobytes() == foretold.tobytes()
        assert isinstance(outgoing, Compressed) or got.tobytes() == outgoing.tobytes()


def test_rows_of_compressed_tensors_by_hand() -> None:
    """A third entry names the compression; dtype and shape are the decoded tensor's, lengths the payload's."""
    x = np.zeros((2, 3), np.float32)
    tensors = [
        Compressed(x, Compression.FLOAT16),
        x,
        Compressed(x.astype(">f4"), Compression.BFLOAT16),
        Compressed(x, Compression.BLOCKWISE_8BIT),
        Compressed(np.array(1, np.float32), Compression.FLOAT16),
        Compressed(np.zeros((0, 7), np.float32), Compression.BLOCKWISE_8BIT),
    ]
    table = describe(tensors)
    assert table == [
        ["float32", [2, 3], "float16"],
        ["float32", [2, 3]],
        ["float32", [2, 3], "bfloat16"],
        ["float32", [2, 3], "blockwise8"],
        ["float32", [], "float16"],
        ["float32", [0, 7], "blockwise8"],
    ]
    assert all(type(row[2]) is str for row in table if len(row) == 3)  # the header's codec knows no enumerations
    assert layout_untrusted(table).nbytes == 4 * 64 + 2  # payloads of 12, 24, 12, 10 and 2 bytes
    assert sum(len(buffer) for buffer in buffers_of(tensors)) == 4 * 64 + 2


def test_layout_of_compressed_tensors_by_hand() -> None:
    """Payloads stand at multiples of 64 like any tensor: 1.0 is 0x3c00 in float16; one value at scale 1.0 is 127."""
    one = np.ones(1, np.float32)
    tensors = [Compressed(one, Compression.FLOAT16), one, Compressed(one, Compression.BLOCKWISE_8BIT)]
    body = b"".join(buffers_of(tensors))
    assert body == b"\x00\x3c" + bytes(62) + b"\x00\x00\x80\x3f" + bytes(60) + b"\x00\x00\x80\x3f\x7f"


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_tensors_do_not_keep_the_body(kind: Compression) -> None:
    """A decoded tensor lives in memory of its own, aligned even where its payload is not the first."""
    tensors = [np.arange(3, dtype=np.int8), Compressed(np.arange(50, dtype=np.float32), kind)]
    body = body_of(b"".join(buffers_of(tensors)))
    as_is, arrived = views_untrusted(layout_untrusted(describe(tensors)), body)
    assert np.shares_memory(as_is, np.frombuffer(body, np.uint8))
    assert not np.shares_memory(arrived, np.frombuffer(body, np.uint8))
    assert arrived.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_bytes_are_bounded(kind: Compression, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of what compressed rows decode to is checked on both sides; plain rows do not count."""
    wrapped = Compressed(np.ones(1000, np.float32), kind)
    tensors = [wrapped, np.ones(5000, np.float32), wrapped]
    monkeypatch.setattr("dmoe_net.wire.tensors.MAX_DECODED_BYTES", 8000)
    table = describe(tensors)
    body = body_of(b"".join(buffers_of(tensors)))
    assert len(views_untrusted(layout_untrusted(table), body)) == 3
    monkeypatch.setattr("dmoe_net.wire.tensors.MAX_DECODED_BYTES", 7999)
    with pytest.raises(LocalProtocolError, match="8000 bytes of tensors to be compressed"):
        describe(tensors)
    with pytest.raises(RemoteProtocolError, match="more than 7999 bytes once decoded"):
        layout_untrusted(table)


def test_decoded_bytes_are_bounded_unasked() -> None:
    """Without a word from the caller the bound is `MAX_DECODED_BYTES`: what frames could carry uncompressed."""
    size = MAX_DECODED_BYTES // 4
    table = [["float32", [size], "blockwise8"]]
    assert layout_untrusted(table).nbytes == encoded_nbytes(Compression.BLOCKWISE_8BIT, size)
    with pytest.raises(RemoteProtocolError, match="once decoded"):
        layout_untrusted([*table, ["float32", [1], "bfloat16"]])
    huge = np.broadcast_to(np.float32(1), (size + 1,))  # no memory behind it
    with pytest.raises(LocalProtocolError, match="to be compressed"):
        describe([Compressed(huge, Compression.FLOAT16)])


@settings(max_examples=150)
@given(st.sampled_from(KINDS), st.integers(0, 50), st.binary(max_size=128))
def test_hostile_payloads(kind: Compression, size: int, content: bytes) -> None:
    """Random bodies either decode to a tensor of the table's shape or are RemoteProtocolErrors; NumPy never warns."""
    table = [["float32", [size], kind.value]]
    body = body_of(content)
    if len(content) == encoded_nbytes(kind, size):
        assert views_untrusted(layout_untrusted(table), body)[0].shape == (size,)
    else:
        with pytest.raises(RemoteProtocolError, match="tensor table describes"):
            views_untrusted(layout_untrusted(table), body)


def test_as_outgoing_wraps_float32_only() -> None:
    """Integers, booleans and other floating-point types travel as they are, and everything does without compression;
    `plain` gives back what was wrapped, or what was not."""
    x = np.ones(3, np.float32)
    wrapped = as_outgoing(x, Compression.BFLOAT16)
    assert wrapped.compression is Compression.BFLOAT16
    assert wrapped.tensor is plain(wrapped) is plain(x) is as_outgoing(x, Compression.NONE) is x
    for dtype in set(DTYPES) - {"float32"}:
        other = np.ones(3, DTYPES[dtype])
        assert as_outgoing(other, Compression.BLOCKWISE_8BIT) is other


@pytest.mark.parametrize(
    "tensor",
    [
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
        np.arange(12, dtype=np.float32)[::-2],
        np.arange(5, dtype=">i4"),
        np.broadcast_to(np.float64(2.5), (2, 3)),  # read-only as it is
        np.arange(6, dtype=np.float32),
        np.zeros((0, 2), np.int8),
        np.array(3, np.int8),
    ],
    ids=["transposed", "strided", "big-endian", "broadcast", "writeable", "empty", "scalar"],
)
def test_arrays_of_any_form_arrive_with_the_same_values(tensor: Tensor) -> None:
    """Arrays that are not C-contiguous and little-endian are put in order first, and rank 0 stays rank 0. `as_received`
    copies these, too, and those that their owners could still write to."""
    is_in_order = tensor.flags.c_contiguous and tensor.dtype.isnative
    tensor.flags.writeable = is_in_order  # one reason at a time
    received = as_received(tensor)
    assert not np.shares_memory(received, tensor)
    assert (received.dtype, received.shape) == (tensor.dtype.newbyteorder("<"), tensor.shape)
    assert (received.flags.c_contiguous, received.flags.writeable) == (True, False)
    for arrived in (received, *travel(tensor)):
        assert arrived.shape == tensor.shape
        assert np.array_equal(arrived, tensor)


def test_as_received_copies_no_received_tensor() -> None:
    received = as_received(np.arange(6, dtype=np.float32))
    assert as_received(received) is received


@pytest.mark.parametrize("kind", KINDS)
def test_as_received_loses_what_compression_loses(kind: Compression) -> None:
    """The values differ from the original's, and are those of the payload."""
    tensor = np.random.default_rng(0).normal(size=(30, 7)).astype(np.float32)
    tensor.flags.writeable = False  # which would do for a plain one
    received = as_received(Compressed(tensor, kind))
    assert not np.array_equal(received, tensor)
    assert bytes(encode(Compressed(received, kind))) == bytes(encode(Compressed(tensor, kind)))


def test_as_received_refuses_what_cannot_be_sent() -> None:
    with pytest.raises(LocalProtocolError):
        as_received(np.zeros(2, np.complex64))
    with pytest.raises(LocalProtocolError):
        as_received(Compressed(np.zeros((1,) * (MAX_RANK + 1), np.float32), Compression.FLOAT16))
