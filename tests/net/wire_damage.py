"""Streams of the wire format, damaged: blindly, or by somebody who knows the format and lies about one thing."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import PeerId
from dmoe_net.wire import codec, tensors
from dmoe_net.wire.codec import encode
from dmoe_net.wire.compression import Compressed, Compression
from dmoe_net.wire.messages import (
    CallCancel,
    CallError,
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
)
from tests.net.wire_parts import CHUNK, OPEN, RESET, WHOLE, preamble

BOUNDARIES = [0, 1, 2, 63, 64, 255, 256, 65535, 65536, 65537, 262143, 524288, 262145]
BOUNDARIES += [2**20, 2**20 + 1, 2**28, 2**28 + 1]
BOUNDARIES += [2**31, 2**32 - 1, 2**32, 2**40, 2**40 + 1, 2**63 - 1, 2**63, 2**64 - 1]
ODDITIES: list[Any] = [None, True, False, -1, 0.0, -1.0, 0.5, float("inf"), 1e300, "", "x", "none", b"", bytes(32)]
ODDITIES += [[], {}, [1], {"a": 1}, [[]], [None] * 70, "x" * 2000, "ping", "hello", "call", "goodbye", "bfloat16"]
ODDITIES += BOUNDARIES
SHAPES: list[list[int]] = [[], [0], [1] * 9, [2**40], [2**40, 0], [2**40, 2**40, 0], [2**20] * 4, [-1], [4096]]

FLOATS = np.linspace(-3, 3, 5000, dtype=np.float32)
TENSORS = (FLOATS, np.array([[True, False]]), np.zeros((2, 0), np.int64), np.arange(7, dtype=np.float64))
TENSORS += (np.array(3, np.uint16), np.ones(3, ml_dtypes.bfloat16))
COMPRESSED = tuple(Compressed(FLOATS[:4100], kind) for kind in Compression if kind is not Compression.NONE)
LARGE = np.zeros(600_000, np.uint8)

MESSAGES: list[Message] = [
    CallStart(call_id=1, method="forward", timeout_s=2.5, body={"uid": "ffn.3.17"}, tensors=TENSORS),
    CallStart(call_id=2, method="backward", timeout_s=0.1, body={"a": [1, {"b": None}]}, tensors=COMPRESSED),
    CallStart(call_id=3, method="dht.find", timeout_s=60.0, body={"key": bytes(32), "n": -5, "x": 1e300}),
    CallStart(call_id=4, method="large", timeout_s=60.0, body={}, tensors=(LARGE, FLOATS)),
    CallReply(call_id=1, body={"ok": [True, 1.5]}, tensors=COMPRESSED[2:] + TENSORS[3:]),
    CallReply(call_id=1, body={}, tensors=(LARGE,)),
    CallError(call_id=1, kind=ErrorKind.BUSY, message="full…"),
]
MESSAGES += [CallCancel(call_id=3), Credit(nbytes=1000), Ping(), Pong(), Goodbye()]
HELLO = Hello(peer_id=PeerId(bytes(32)), instance=bytes(8), port=4001, window_bytes=2**20, compressions=("float16",))


@dataclass(frozen=True)
class RawPart:
    """A part that may lie: the number and length of its preamble, and what follows."""

    kind: int
    number: int
    length: int
    header: dict[str, Any] | None
    data: bytes

    def encoded(self) -> bytes:
        head = b"" if self.header is None else encode(self.header)
        return preamble(self.kind, self.number, self.length % 2**64) + head + self.data


def raw_parts(message: Message) -> list[RawPart]:
    """A message as it would be sent alone; a large one in chunks of 400,000 bytes as stream 0."""
    encoded = encode_message(message)
    body = b"".join(encoded.body)
    header = codec.decode_untrusted(encoded.head)
    if not encoded.is_large:
        return [RawPart(WHOLE, len(encoded.head), len(body), header, body)]
    chunks = [body[start : start + 400_000] for start in range(0, len(body), 400_000)]
    parts = [RawPart(OPEN, len(encoded.head), len(body), header, b"")]
    return parts + [RawPart(CHUNK, 0, len(chunk), None, chunk) for chunk in chunks]


HELLO_PARTS = raw_parts(HELLO)
SMALL = [raw_parts(message) for message in MESSAGES if not encode_message(message).is_large]
BIG = [raw_parts(message) for message in MESSAGES if encode_message(message).is_large]


def legal_stream(rng: random.Random) -> list[RawPart]:
    """Hello and a few messages, one of them perhaps large, with others between its chunks, perhaps reset."""
    parts = [part for _ in range(rng.randint(1, 3)) for part in rng.choice(SMALL)]
    if rng.random() < 0.1:
        big = list(rng.choice(BIG))
        if rng.random() < 0.2:
            big[rng.randrange(1, len(big)) :] = [RawPart(RESET, 0, 0, None, b"")]
        for part in reversed(big[1:]):
            parts.insert(rng.randrange(len(parts) + 1), part)
        first = min(index for index, part in enumerate(parts) if part.kind in (CHUNK, RESET))
        parts.insert(first, big[0])
    return HELLO_PARTS + parts


def pick(parts: list[RawPart], rng: random.Random, condition: Callable[[RawPart], bool]) -> int | None:
    """The index of one of the parts that fulfil a condition."""
    indices = [index for index, part in enumerate(parts) if condition(part)]
    return rng.choice(indices) if indices else None


def has_sound_table(part: RawPart) -> bool:
    """Return True if a part has a table of tensors, not empty, whose rows no earlier lie has touched."""
    try:
        return isinstance(part.header, dict) and tensors.layout_untrusted(part.header.get("tensors", [])).nbytes > 0
    except RemoteProtocolError:
        return False


def lie_in_header(parts: list[RawPart], rng: random.Random) -> None:
    """Change one value somewhere inside a header, which stays canonical and keeps a fitting length."""
    index = pick(parts, rng, lambda part: part.header is not None)
    if index is None:
        return
    part = parts[index]
    header = damaged_value(part.header, rng) if rng.random() < 0.95 else rng.choice(ODDITIES)
    number = len(encode(header))
    parts[index] = replace(part, header=header, number=number)


def damaged_value(value: Any, rng: random.Random) -> Any:
    """`value` with one thing in it replaced, added, removed or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(12):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return value | {rng.choice(["extra", "tensors", "id", "a"]): rng.choice(ODDITIES)}
            case _:
                return value | {key: damaged_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                return value[:index] + value[index + 1 :]
            case 1:
                return [*value[:index], rng.choice(ODDITIES), *value[index:]]
            case 2:
                return (value + [value[index]] * rng.choice([1, 2, 8, 70]))[:100]
            case _:
                return [*value[:index], damaged_value(value[index], rng), *value[index + 1 :]]
    if isinstance(value, int) and rng.random() < 0.5:
        return (value + rng.choice([-1, 1, 2, 2**20])) % 2**63
    return rng.choice(ODDITIES)


def lie_in_preamble(parts: list[RawPart], rng: random.Random) -> None:
    """Change a kind, a number or a length, of a chunk if there is one."""
    index = pick(parts, rng, lambda part: part.kind in (CHUNK, RESET))
    if index is None or rng.random() < 0.2:
        index = rng.randrange(len(parts))
    part = parts[index]
    match rng.randrange(3):
        case 0:
            parts[index] = replace(part, kind=rng.choice([WHOLE, OPEN, CHUNK, RESET, 4, 255]))
        case 1:
            parts[index] = replace(part, number=rng.choice([*BOUNDARIES[:18], part.number + 1]) % 2**32)
        case 2:
            parts[index] = replace(part, length=rng.choice([*BOUNDARIES, part.length - 1, part.length + 1]))


def shuffle_parts(parts: list[RawPart], rng: random.Random) -> None:
    """Swap, repeat or lose parts, those of a large frame if there is one."""
    first, second = rng.randrange(len(parts)), rng.randrange(len(parts))
    if rng.random() < 0.8:
        first = pick(parts, rng, lambda part: part.kind != WHOLE) or first
    match rng.randrange(3):
        case 0:
            parts[first], parts[second] = parts[second], parts[first]
        case 1:
            parts[second:second] = [parts[first]] * rng.choice([1, 1, 3])
        case 2:
            del parts[first]


def lie_about_shape(parts: list[RawPart], rng: random.Random) -> None:
    """Another shape, dtype or compression with the payload as it was, or a body cut to what the table says."""
    index = pick(parts, rng, has_sound_table)
    if index is None:
        return
    part = parts[index]
    table = [list(row) for row in part.header["tensors"]]
    row = rng.choice(table)
    match rng.randrange(5):
        case 0:
            row[1] = rng.choice(SHAPES) if rng.random() < 0.9 else row[1][::-1]
        case 1:
            row[0] = rng.choice([*tensors.DTYPES, "complex64"])
        case 2:
            row[2:] = rng.choice([[], ["none"], ["float16"], ["bfloat16"], ["blockwise8"], ["zip"], [1]])
        case 3:
            table = (table * rng.choice([0, 2, 70]))[:100]
        case 4:
            row[:] = ["float32", [2 ** rng.randrange(24, 30)], "blockwise8"]
    header = part.header | {"tensors": table}
    try:
        length = tensors.layout_untrusted(table).nbytes
    except RemoteProtocolError:
        length = part.length
    body = (part.data + bytes(64))[:length]
    parts[index] = replace(part, header=header, number=len(encode(header)), length=length, data=body)


def lie_about_type(parts: list[RawPart], rng: random.Random) -> None:
    """The header of another message, with the tensors that were there."""
    index = pick(parts, rng, has_sound_table)
    if index is None:
        return
    part, other = parts[index], rng.choice(SMALL)[0].header
    header = other | {"tensors": part.header["tensors"]}
    parts[index] = replace(part, header=header, number=len(encode(header)))


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, replace, insert, remove or splice bytes, or end too early; mostly where headers are."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        if not out:
            break
        where = rng.randrange(min(len(out), rng.choice([16, 200, 600, len(out)])))
        size = rng.choice([1, 1, 2, 8, 40])
        match rng.randrange(6):
            case 0:
                out[where : where + 1] = bytes([out[where] ^ 1 << rng.randrange(8)])
            case 1:
                out[where : where + size] = rng.randbytes(size)
            case 2:
                out[where:where] = rng.randbytes(size)
            case 3:
                del out[where : where + size]
            case 4:
                start = rng.randrange(len(SPLICES))
                out[where : where + rng.choice([0, size])] = SPLICES[start : start + size]
            case 5:
                del out[max(where, 1) :]
    return bytes(out)


def damage_cbor(parts: list[RawPart], rng: random.Random) -> None:
    """Damage a header's bytes under a preamble that fits them."""
    index = pick(parts, rng, lambda part: part.header is not None)
    if index is None:
        return
    part = parts[index]
    head = damage_bytes(encode(part.header), rng)
    if rng.random() < 0.2:
        where = rng.randrange(len(head) + 1)
        head = head[:where] + rng.choice(CBOR_ODDITIES) + head[where + 1 :]
    parts[index] = replace(part, header=None, number=len(head), data=head + part.data)


# NaN, undefined, a simple value, a long head, a tag, indefinite lengths, odd keys, a long float, big integers, bad
# UTF-8, a shared value, a break.
ODD_HEX = (
    "f97e00", "f7", "f820", "1801", "c11a514b67b0", "bf6161f6ff", "5f41004100ff", "a10102", "a2616101616102",
    "fb3ff0000000000000", "c249010000000000000000", "3bffffffffffffffff", "62ff61", "d81c80", "ff",
)  # fmt: skip
CBOR_ODDITIES = [b"\x81" * 40, *map(bytes.fromhex, ODD_HEX)]
SPLICES = b"".join(part.encoded() for group in [HELLO_PARTS, *SMALL] for part in group)
LIES: list[Callable[[list[RawPart], random.Random], None]] = [
    lie_in_header, lie_in_header, lie_in_preamble, shuffle_parts, lie_about_shape, lie_about_type, damage_cbor,
]  # fmt: skip


def damaged_stream(rng: random.Random) -> bytes:
    """One input: a legal stream with one lie, seldom more, or with damaged bytes."""
    parts = legal_stream(rng)
    if rng.random() < 0.2:
        return damage_bytes(b"".join(part.encoded() for part in parts), rng)
    for _ in range(rng.choice([1, 1, 1, 2])):
        if parts:
            rng.choice(LIES)(parts, rng)
    return b"".join(part.encoded() for part in parts)
