"""Compression: every kind stays within its documented error, hides no fault, and decodes whatever a peer sends."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.wire.compression import (
    BLOCK_SIZE,
    Compressed,
    Compression,
    decode_into_untrusted,
    encode,
    encoded_nbytes,
    is_compressible,
)
from dmoe_net.wire.tensors import Tensor

KINDS = [kind for kind in Compression if kind is not Compression.NONE]
CASTS = [Compression.FLOAT16, Compression.BFLOAT16]
MAX = float(np.finfo(np.float32).max)

# Around one block, and one tile and a bit (tiles are 64 blocks).
SIZES = [0, 1, 4095, 4096, 4097, 2 * 4096, 65 * 4096 + 5]

each_kind = pytest.mark.parametrize("kind", KINDS)


def decoded(payload: bytes | memoryview, kind: Compression, shape: tuple[int, ...]) -> Tensor:
    out = np.full(shape, 123.0, np.float32)
    decode_into_untrusted(memoryview(payload), kind, out)
    return out


def round_trip(tensor: Tensor, kind: Compression) -> Tensor:
    return decoded(encode(Compressed(tensor, kind)), kind, tensor.shape)


def allowed_error(tensor: Tensor, kind: Compression) -> Tensor:
    """The documented bound for each value of a flat tensor, in float64, straight from the table in the docstring."""
    exact = np.abs(tensor.astype(np.float64))
    if kind is Compression.FLOAT16:
        return np.maximum(np.where(exact > 65504, exact - 65504, exact * 2.0**-11), 2.0**-25)
    if kind is Compression.BFLOAT16:
        return np.maximum(exact * 2.0**-8, 2.0**-134)
    starts = range(0, tensor.size, 4096)
    largest = np.array([exact[start : start + 4096].max() for start in starts])
    # "To within float32's rounding": a few roundings of numbers up to the largest, and of subnormal ones.
    return np.repeat(largest * (1 / 254 + 2.0**-22) + 2.0**-147, 4096)[: tensor.size]


def check_error(tensor: Tensor, kind: Compression) -> None:
    flat = np.ascontiguousarray(tensor).reshape(-1)
    error = np.abs(round_trip(flat, kind).astype(np.float64) - flat)
    assert (error <= allowed_error(flat, kind)).all()


def finite_floats(limit: float = MAX) -> st.SearchStrategy[Tensor]:
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6)
    return hnp.arrays(np.float32, shapes, elements=st.floats(-limit, limit, width=32))


def any_bits() -> st.SearchStrategy[Tensor]:
    """float32 of any bits: among them the ends of its ranges, infinities, NaN quiet and signalling."""
    special = [0, 1, 0x007FFFFF, 0x00800000, 0x477FEFFF, 0x477FF000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000]
    patterns = st.sampled_from(special + [pattern | 1 << 31 for pattern in special]) | st.integers(0, 2**32 - 1)
    return st.lists(patterns, max_size=8).map(lambda bits: np.array(bits, np.uint32).view(np.float32))


@each_kind
@settings(max_examples=150)
@given(tensor=finite_floats())
def test_error_bound_of_arbitrary_values(kind: Compression, tensor: Tensor) -> None:
    """Any finite float32, subnormal or the largest, comes back within the bound that the table documents."""
    check_error(tensor, kind)


@each_kind
@pytest.mark.parametrize("size", SIZES)
def test_error_and_length_at_every_size(kind: Compression, size: int) -> None:
    """Values around the ends of blocks and tiles stay within the bound, zeros stay zeros, and the length is known."""
    rng = np.random.default_rng(size)
    tensor = (rng.normal(size=size) * np.exp(rng.normal(size=size // 4096 + 1)).repeat(4096)[:size]).astype(np.float32)
    check_error(tensor, kind)
    assert not round_trip(np.zeros(size, np.float32), kind).any()
    expected = size + 4 * -(-size // BLOCK_SIZE) if kind is Compression.BLOCKWISE_8BIT else 2 * size
    assert len(encode(Compressed(tensor, kind))) == encoded_nbytes(kind, size) == expected
    assert encoded_nbytes(Compression.NONE, size) == 4 * size


@pytest.mark.parametrize(
    ("kind", "rms_loss"),
    [
        (Compression.FLOAT16, 0.72 * 2**-10 / 12**0.5),
        (Compression.BFLOAT16, 0.72 * 2**-7 / 12**0.5),
        (Compression.BLOCKWISE_8BIT, 3.6 / 127 / 12**0.5),
    ],
)
def test_typical_loss(kind: Compression, rms_loss: float) -> None:
    """Values of unit variance are off by step / sqrt(12), root mean square, as rounding to nearest should be.

    A cast's step is 2**-10 or 2**-7 times the power of two below the value, on average 1 / (2 ln 2) = 0.72 of the
    value. A block's step is a 127th of its largest value: of 4096 normal ones, about 3.6.
    """
    tensor = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    rms = float(np.sqrt(np.mean((round_trip(tensor, kind) - tensor) ** 2)))
    assert 0.85 * rms_loss < rms < 1.15 * rms_loss


@pytest.mark.parametrize("kind", CASTS)
@settings(max_examples=150)
@given(tensor=any_bits())
def test_casts_lose_once_and_keep_nan_and_infinity(kind: Compression, tensor: Tensor) -> None:
    """A relay encodes the same bytes; NaN stays NaN, infinities keep their sign, and no finite value becomes either."""
    payload = encode(Compressed(tensor, kind))
    arrived = decoded(payload, kind, tensor.shape)
    assert bytes(encode(Compressed(arrived, kind))) == bytes(payload)
    assert np.array_equal(np.isnan(arrived), np.isnan(tensor))
    assert np.array_equal(np.where(np.isinf(arrived), arrived, 0), np.where(np.isinf(tensor), tensor, 0))


@settings(max_examples=150)
@given(tensor=finite_floats())
def test_blockwise_is_idempotent_on_finite_values(tensor: Tensor) -> None:
    """The same holds of blocks, unless their steps are too fine for float32: the largest value comes back exactly."""
    if tensor.size and 0 < np.abs(tensor).max() < 1e-30:
        tensor = np.multiply(tensor, np.float32(1e30), out=np.empty_like(tensor))
    payload = encode(Compressed(tensor, Compression.BLOCKWISE_8BIT))
    again = decoded(payload, Compression.BLOCKWISE_8BIT, tensor.shape)
    assert bytes(encode(Compressed(again, Compression.BLOCKWISE_8BIT))) == bytes(payload)
    if tensor.size:
        assert np.abs(again).max() == np.abs(tensor).max()


@settings(max_examples=150)
@given(tensor=any_bits())
def test_blockwise_hides_no_fault(tensor: Tensor) -> None:
    """One NaN or infinity makes its whole block NaN; a block without stays finite."""
    arrived = round_trip(tensor, Compression.BLOCKWISE_8BIT)
    if np.isfinite(tensor).all():
        assert np.isfinite(arrived).all()
    else:
        assert np.isnan(arrived).all()


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_a_fault_stays_in_its_block(fault: float) -> None:
    tensor = np.random.default_rng(1).normal(size=3 * 4096 + 7).astype(np.float32)
    expected = round_trip(tensor, Compression.BLOCKWISE_8BIT)
    tensor[2 * 4096 - 1] = fault
    arrived = round_trip(tensor, Compression.BLOCKWISE_8BIT)
    assert np.isnan(arrived[4096 : 2 * 4096]).all()
    keep = np.r_[0:4096, 2 * 4096 : tensor.size]
    assert np.array_equal(arrived[keep], expected[keep])


def test_float16_clips_what_it_cannot_hold() -> None:
    """65520 would round to infinity; finite values beyond the range become its end, infinite ones stay infinite."""
    tensor = np.array([65504, 65519, 65520, 1e30, -1e30, np.inf, -np.inf, 1], np.float32)
    expected = [65504, 65504, 65504, 65504, -65504, np.inf, -np.inf, 1]
    assert round_trip(tensor, Compression.FLOAT16).tolist() == expected


def test_bfloat16_clips_what_it_cannot_hold() -> None:
    """The largest float32 rounds to infinity in bfloat16, whose own largest is 0x7f7f = (2 - 2**-7) * 2**127."""
    arrived = round_trip(np.array([MAX, -MAX, np.inf], np.float32), Compression.BFLOAT16)
    assert arrived.tolist() == [(2 - 2**-7) * 2.0**127, -(2 - 2**-7) * 2.0**127, np.inf]


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        # 1.0 and -2.0: 0x3c00, 0xc000 in float16; 0x3f80, 0xc000 in bfloat16. Little-endian.
        (Compression.FLOAT16, "003c 00c0"),
        (Compression.BFLOAT16, "803f 00c0"),
        # Scale 2.0 = 0x40000000; 1.0 is 63.5 steps, which rounds to the even 64; -2.0 is -127 = 0x81.
        (Compression.BLOCKWISE_8BIT, "00000040 40 81"),
    ],
)
def test_payloads_by_hand(kind: Compression, payload: str) -> None:
    tensor = np.array([1.0, -2.0], np.float32)
    assert bytes(encode(Compressed(tensor, kind))) == bytes.fromhex(payload)
    second_step = 1.0 if kind is not Compression.BLOCKWISE_8BIT else 64 / 127 * 2
    assert np.allclose(decoded(bytes.fromhex(payload), kind, (2,)), [second_step, -2.0], rtol=1e-7, atol=0)


def test_a_faulty_block_by_hand() -> None:
    """Its scale is NaN and its steps are zero, on every processor and whatever else is in it."""
    tensor = np.array([3.0, np.inf, -1.0, np.nan], np.float32)
    assert bytes(encode(Compressed(tensor, Compression.BLOCKWISE_8BIT))) == bytes.fromhex("0000c07f 00 00 00 00")


def test_blockwise_layout_by_hand() -> None:
    """All scales come first, one for each block of 4096 and one for the rest; then one byte for each value."""
    tensor = np.r_[np.full(4096, 3.0), np.full(1, -5.0)].astype(np.float32)
    payload = bytes(encode(Compressed(tensor, Compression.BLOCKWISE_8BIT)))
    assert payload == np.array([3.0, 5.0], "<f4").tobytes() + b"\x7f" * 4096 + b"\x81"


UNUSUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.T,
    "strided": lambda x: x[::-2, 1::3],
    "big-endian": lambda x: x.astype(">f4"),
    "broadcast": lambda x: np.broadcast_to(x[0, 0], (3, 2)),
    "scalar": lambda x: np.array(x[0, 0]),
}


@each_kind
@pytest.mark.parametrize("unusual", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_arrays(kind: Compression, unusual: Callable[[Tensor], Tensor]) -> None:
    """Memory layout does not matter: the same values give the same bytes, in C order."""
    tensor = unusual(np.random.default_rng(2).normal(size=(70, 90)).astype(np.float32))
    usual = np.array(tensor, np.float32, order="C")
    assert bytes(encode(Compressed(tensor, kind))) == bytes(encode(Compressed(usual, kind)))
    assert decoded(encode(Compressed(tensor, kind)), kind, tensor.shape).shape == tensor.shape


@each_kind
def test_the_tensor_is_not_touched(kind: Compression) -> None:
    """Encoding works in buffers of its own: read-only tensors pass, and the payload aliases nothing."""
    tensor = np.array([1.0, np.nan, 1e30, np.inf], np.float32)
    before = tensor.tobytes()
    tensor.flags.writeable = False
    payload = encode(Compressed(tensor, kind))
    assert tensor.tobytes() == before
    assert not np.shares_memory(np.frombuffer(payload, np.uint8), tensor)


@each_kind
@settings(max_examples=150)
@given(data=st.data(), size=st.integers(0, 40))
def test_any_payload_decodes(kind: Compression, data: st.DataObject, size: int) -> None:
    """Random bytes of the right length give values that depend on nothing else; never a warning, never an error."""
    nbytes = encoded_nbytes(kind, size)
    payload = memoryview(data.draw(st.binary(min_size=nbytes, max_size=nbytes)))
    zeros, ones = np.zeros(size, np.float32), np.ones(size, np.float32)
    decode_into_untrusted(payload, kind, zeros)
    decode_into_untrusted(payload, kind, ones)
    assert zeros.tobytes() == ones.tobytes()


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (np.nan, [np.nan, np.nan, np.nan]),
        (np.inf, [np.nan, np.inf, -np.inf]),
        (-127.0, [-0.0, -127.0, 128.0]),
        (MAX, [0.0, MAX, -np.inf]),
    ],
)
def test_hostile_scales(scale: float, expected: list[float]) -> None:
    """Scales that we would never send, with the step -128 that we never send either, decode by plain arithmetic."""
    payload = np.array([scale], "<f4").tobytes() + bytes([0, 127, 128])
    arrived = decoded(payload, Compression.BLOCKWISE_8BIT, (3,))
    assert np.array_equal(arrived, np.array(expected, np.float32), equal_nan=True)


@each_kind
@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("size", [0, 1, 4096, 4097])
def test_payloads_of_another_length_are_refused(kind: Compression, change: int, size: int) -> None:
    """A byte too few or too many is a RemoteProtocolError before anything is read."""
    nbytes = encoded_nbytes(kind, size) + change
    if nbytes >= 0:
        with pytest.raises(RemoteProtocolError, match=f"{size} values in {kind}"):
            decoded(bytes(nbytes), kind, (size,))


@each_kind
def test_strict_numpy_settings_do_not_matter(kind: Compression) -> None:
    """A program that asks NumPy to raise on floating-point exceptions gets the same bytes and values."""
    tensor = np.array([1e30, 1e-45, np.inf, np.nan, -0.0], np.float32)
    usual = encode(Compressed(tensor, kind))
    with np.errstate(all="raise"):
        payload = encode(Compressed(tensor, kind))
        decoded(payload, kind, tensor.shape)
    assert bytes(payload) == bytes(usual)


@pytest.mark.parametrize(
    ("tensor", "compression", "message"),
    [
        (np.zeros(1, np.float64), Compression.FLOAT16, "NumPy array of float32 to compress, got one of float64"),
        (np.zeros(1, np.int32), Compression.BLOCKWISE_8BIT, "got one of int32"),
        (np.zeros(1, ml_dtypes.bfloat16), Compression.BLOCKWISE_8BIT, "got one of bfloat16"),
        ([1.0], Compression.FLOAT16, "got a list"),
        (np.zeros(1, np.float32), Compression.NONE, "expected a compression among float16, bfloat16, blockwise8"),
        (np.zeros(1, np.float32), "float16", "got 'float16'"),
    ],
)
def test_wrong_wishes_are_refused(tensor: Tensor, compression: Compression, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Compressed(tensor, compression)


def test_what_can_be_compressed() -> None:
    """float32 in either byte order; nothing else that happens to have numbers in it."""
    assert is_compressible(np.zeros(1, "<f4"))
    assert is_compressible(np.zeros(1, ">f4"))
    assert not is_compressible(np.zeros(1, np.float16))
    assert not is_compressible(np.float32(1))
