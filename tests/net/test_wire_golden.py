"""The wire format, byte by byte: what the vectors in golden/frames.hex say is written, read, and specified.

The README beside the wire modules is the specification. A decoder written from it alone (`tests.net.wire_reference`)
reads the same vectors, so the two cannot drift apart.
"""

import hashlib
import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dmoe_net.identity import PeerId
from dmoe_net.keys import Identity, Membership, certificate_chain
from dmoe_net.wire.compression import Compressed, Compression
from dmoe_net.wire.frames import VERSION, OutgoingStream, encode_frame
from dmoe_net.wire.messages import (
    CallCancel,
    CallError,
    CallPartial,
    CallReply,
    CallStart,
    Credit,
    ErrorKind,
    Goodbye,
    Hello,
    Message,
    Ping,
    Pong,
    encode_message,
    parse_untrusted,
)
from tests.net import wire_reference
from tests.net.wire_parts import part_bytes, parts_of, read

BREAKS = (
    "these bytes changed: that breaks the wire format. If it is meant, raise VERSION in net/dmoe_net/wire/frames.py"
)
DIGESTS = {
    2: "f19b6d030fdb90d80f8ae2f6b4fa0506ea6531690ef915e961924d4dcf4fdd8b",
    3: "6ed51fa6739459d366f0ab28b37b5966906561dd0cefba66b6a4450339ffa492",
}
"""Version of the wire format -> SHA-256 of all its vectors. Whoever changes a vector adds a line, and changes none."""
README = Path(__file__).parents[2] / "net" / "dmoe_net" / "wire" / "README.md"


def parse_hex(text: str) -> bytes:
    """Bytes written as in golden/frames.hex."""
    data = b""
    for line in text.splitlines():
        for word in line.split("#")[0].split():
            digits, _, times = word.partition("*")
            data += bytes.fromhex(digits) * int(times or 1)
    return data


def load_vectors() -> dict[str, bytes]:
    """golden/frames.hex, by name."""
    text = (Path(__file__).parent / "golden" / "frames.hex").read_text()
    sections = re.split(r"^\[(.*)\]$", text, flags=re.MULTILINE)
    return {name: parse_hex(body) for name, body in zip(sections[1::2], sections[2::2], strict=True)}


VECTORS = load_vectors()


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


CLIENT = Hello(peer_id=PeerId(b"\xff" * 32), instance=bytes(8), port=None, window_bytes=2**16, calls=1, software="x")
MESSAGES: dict[str, Message] = {
    "hello": Hello(
        peer_id=PeerId(bytes(range(32))),
        instance=bytes(range(0xA0, 0xA8)),
        port=4001,
        host="a.example",
        window_bytes=2**26,
        compressions=("float16", "bfloat16", "blockwise8"),
        calls=7,
        software="peer 1",
    ),
    "hello of a client": CLIENT,
    "hello of a lane": replace(CLIENT, lane=True),
    "call": CallStart(
        call_id=1,
        method="forward",
        timeout_s=2.5,
        body={"uid": "ffn.3.17"},
        tensors=(f32(1, -2), np.array([258], np.int16)),
    ),
    "call without tensors": CallStart(
        call_id=2**63 - 1,
        method="dht.find",
        timeout_s=86400.0,
        body={"b": True, "f": False, "h": float("inf"), "i": -100, "n": None, "s": 100000.5, "u": 2**64 - 1, "z": -0.0}
        | {"bb": [1, [24, 256]], "bd": 0.1, "xx": b"\x00\xff\x00\xff", "ü": "ü"},
    ),
    "call with every dtype": CallStart(
        call_id=2,
        method="m",
        timeout_s=0.5,
        body={},
        tensors=(
            np.array([True, False, True]),
            np.array([-128, 127], np.int8),
            np.array([-2, -(2**15)], np.int16),
            np.array([1, -(2**31)], np.int32),
            np.array([-(2**63), 2**63 - 1], np.int64),
            np.array([0, 255], np.uint8),
            np.array([0x0201], np.uint16),
            np.array([0x04030201], np.uint32),
            np.array([0x0807060504030201], np.uint64),
            np.array([1, 2**-24], np.float16),
            np.array([[1], [np.finfo(np.float32).max]], np.float32),
            np.array(1.5, np.float64),
            np.zeros((3, 0, 100), np.float64),
            np.array([1, -2, np.nan], ml_dtypes.bfloat16),
            np.zeros(0, np.uint8),
        ),
    ),
    "call that takes partials": CallStart(call_id=1, method="m", timeout_s=1.0, body={}, partials=True),
    "partial": CallPartial(call_id=5, body={}),
    "reply": CallReply(call_id=24, body={}),
    "reply compressed": CallReply(
        call_id=3,
        body={},
        tensors=(
            Compressed(f32(1, 65536, np.inf, -2), Compression.FLOAT16),
            Compressed(f32(1, -2, np.pi), Compression.BFLOAT16),
            Compressed(f32(1, -0.5, 0.25, 0).reshape(2, 2), Compression.BLOCKWISE_8BIT),
            Compressed(f32(*[2] * 4096, -1), Compression.BLOCKWISE_8BIT),
            Compressed(f32(np.inf, 1), Compression.BLOCKWISE_8BIT),
        ),
    ),
    "error": CallError(call_id=256, kind=ErrorKind.BUSY, message="the queue is full … try"),
    "cancel": CallCancel(call_id=7),
    "credit": Credit(nbytes=2**23),
    "ping": Ping(),
    "pong": Pong(),
    "goodbye": Goodbye(),
}

# By hand: what compression leaves of the tensors above.
DECODED = (
    f32(1, 65504, np.inf, -2),
    f32(1, -2, 3.140625),
    (f32(127, -64, 32, 0) / np.float32(127)).reshape(2, 2),
    f32(*[2] * 4096, -1),
    f32(np.nan, np.nan),
)


def tensors_of(name: str) -> tuple[np.ndarray, ...]:
    """Tensors that the receiver of a vector gets."""
    if name == "reply compressed":
        return DECODED
    return tuple(getattr(MESSAGES[name], "tensors", ()))


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Same dtype, shape and bits, but that one NaN is as good as another."""
    return (left.dtype, left.shape) == (right.dtype, right.shape) and (
        left.tobytes() == right.tobytes() or np.array_equal(left, right, equal_nan=True)
    )


def test_the_version_rises_with_the_vectors() -> None:
    """Vectors that change need another version: else peers that do not understand each other are not told apart."""
    found = hashlib.sha256(b"".join(name.encode() + VECTORS[name] for name in sorted(VECTORS))).hexdigest()
    assert max(DIGESTS) == VERSION, f"add the digest of version {VERSION}: {found}"
    assert DIGESTS[VERSION] == found, f"{BREAKS}, and add its digest here: {found}"


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name: str) -> None:
    """Each is written as exactly these bytes, which are read as exactly this message, also by a decoder that knows the
    README alone."""
    expected, encoded = MESSAGES[name], encode_message(MESSAGES[name])
    (written,) = parts_of(encoded)
    assert written.hex() == VECTORS[name].hex(), BREAKS
    (frame,) = read(VECTORS[name])
    got = parse_untrusted(frame)
    assert type(got) is type(expected), BREAKS
    for field in set(expected.__dataclass_fields__) - {"tensors"}:
        assert repr(getattr(got, field)) == repr(getattr(expected, field)), BREAKS  # repr: -0.0 is not 0.0
    assert len(frame.tensors) == len(tensors_of(name)), BREAKS
    assert all(map(same, frame.tensors, tensors_of(name))), BREAKS
    (specified,) = wire_reference.decode_stream(VECTORS[name])
    assert specified.header == encoded.frame.header
    for tensor, sent in zip(specified.tensors, tensors_of(name), strict=True):
        assert same(tensor, sent.astype(np.float32) if sent.dtype == ml_dtypes.bfloat16 else sent)


BODY = np.resize(np.arange(251, dtype=np.uint8), 600_000)
CHUNKS = [BODY[:524_288].tobytes(), BODY[524_288:].tobytes()]
LARGE = [
    VECTORS["large open"],
    VECTORS["large chunk 0"] + CHUNKS[0],
    VECTORS["ping"],
    VECTORS["large chunk 1"] + CHUNKS[1],
    VECTORS["large open"],
    VECTORS["large chunk of stream 1"] + CHUNKS[0],
    VECTORS["reset of stream 1"],
]
LARGE_SHA256 = "4f9f5649e1308db3a9a31a795220b239408a9445cf1e01a6c599ecad616c1d4c"
"""SHA-256 of `LARGE`, the vectors with their chunks between them."""


def test_encoding_of_a_large_frame() -> None:
    """An OPEN part, a chunk of 512 KiB and the rest, with a ping in between; a second stream is reset."""
    encoded = encode_message(CallReply(call_id=5, body={}, tensors=(BODY,)))
    assert hashlib.sha256(b"".join(LARGE)).hexdigest() == LARGE_SHA256
    first, second = OutgoingStream(encoded, 0), OutgoingStream(encoded, 1)
    parts = [first.next_part() for _ in range(3)]
    parts += [second.next_part(), second.next_part(), second.reset_part()]
    written = [part_bytes(part) for part in parts]
    written[2:2] = parts_of(encode_message(Ping()))
    assert [part[:64].hex() for part in written] == [part[:64].hex() for part in LARGE], BREAKS
    assert hashlib.sha256(b"".join(written)).hexdigest() == LARGE_SHA256, BREAKS


def test_decoding_of_a_large_frame() -> None:
    """The ping overtakes the reply; the stream that was reset never appears. The specification says so too."""
    frames = read(b"".join(LARGE))
    assert [type(parse_untrusted(frame)) for frame in frames] == [Ping, CallReply], BREAKS
    assert same(frames[1].tensors[0], BODY), BREAKS
    ping, reply = wire_reference.decode_stream(b"".join(LARGE))
    assert ping.header == {"type": "ping"}
    assert same(reply.tensors[0], BODY)


def test_the_example_in_the_readme() -> None:
    (block,) = re.findall(r"^```hex\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert parse_hex(block).hex() == VECTORS["call"].hex()


def test_the_limits_in_the_readme() -> None:
    """Each row of its table of limits names a constant and its value."""
    row = r"^\| [^|]* \| ([\d,]+) [^|]*\| `(dmoe_net\.[\w.]+)\.(\w+)` \|$"
    rows = re.findall(row, README.read_text(), re.MULTILINE)
    assert len(rows) == 24
    for value, module, name in rows:
        assert int(value.replace(",", "")) == getattr(importlib.import_module(module), name), name


@pytest.mark.parametrize("value", [None, True, 0, 23, 24, 255, 256, 65535, 65536, 2**32, -1, -24, -25, -(2**63), 0.1])
def test_the_specification_of_cbor(value: Any) -> None:
    """The README's rules give the library's encoding, heads of every length and floats of every width included."""
    nested = {"b": [value, 1.5, 2.0**-24, 65504.0, 65505.0, 1e300], "aa": "x" * 300, "a": bytes(70), "": {"ä": value}}
    assert encode_frame(nested).head.hex() == wire_reference.canonical(nested).hex()


@pytest.mark.parametrize("secret", [b"", b"sixteen bytes or more"])
def test_the_specification_of_certificates(secret: bytes) -> None:
    """A leaf made from the README alone is the one that the library shows, and the only one that it takes."""
    peer = Identity.from_seed(bytes(range(32)))
    unsigned = wire_reference.unsigned_leaf(peer.public_key)
    signature = Ed25519PrivateKey.from_private_bytes(wire_reference.swarm_seed(secret)).sign(unsigned)
    algorithm = wire_reference.der(0x30, bytes.fromhex("06032b6570"))
    leaf = wire_reference.der(0x30, unsigned, algorithm, wire_reference.der(0x03, b"\0" + signature))
    assert leaf.hex() == certificate_chain(peer, Membership(secret=secret)).leaf_certificate.hex()
