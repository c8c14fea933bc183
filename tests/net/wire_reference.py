"""A decoder of the wire format written from net/dmoe_net/wire/README.md alone: nothing of `dmoe_net` is imported here.

It is slow, small and strict. If it cannot read what the library writes, the specification is wrong.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass, field
from math import isinf, isnan, prod
from typing import Any

import cbor2
import numpy as np

ITEM_BYTES = {
    "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "float32": 4, "float64": 8, "bfloat16": 2,
}  # fmt: skip
NUMPY = {
    "bool": "?", "int8": "i1", "int16": "<i2", "int32": "<i4", "int64": "<i8", "uint8": "u1", "uint16": "<u2",
    "uint32": "<u4", "uint64": "<u8", "float16": "<f2", "float32": "<f4", "float64": "<f8",
}  # fmt: skip
BLOCK = 4096
HELLO = "hello of wire version 3"
FIELDS = {
    HELLO: {"type", "peer_id", "instance", "host", "port", "window", "compressions", "calls", "software"},
    "call": {"type", "id", "method", "timeout_s", "body"},
    "reply": {"type", "id", "body"},
    "partial": {"type", "id", "body"},
    "error": {"type", "id", "kind", "message"},
    "cancel": {"type", "id"},
    "credit": {"type", "nbytes"},
    "ping": {"type"},
    "pong": {"type"},
    "goodbye": {"type"},
}
FLAGS = {HELLO: "lane", "call": "partials"}


@dataclass
class Message:
    """A frame: its header without the table, the table, the decoded tensors (bfloat16 as float32)."""

    header: dict[str, Any]
    table: list[list[Any]]
    tensors: list[np.ndarray] = field(default_factory=list)


def need(condition: bool, what: str) -> None:
    """A rule of the specification."""
    if not condition:
        raise ValueError(what)


def decode_stream(data: bytes) -> list[Message]:
    """The messages of one direction of a connection that ends at a boundary."""
    messages: list[Message] = []
    streams: dict[int, tuple[Message, int, bytearray]] = {}
    opened = at = 0
    while at < len(data):
        magic, version, kind, number, length = struct.unpack_from(">2sBBIQ", data, at)
        need(magic == b"DX" and version in ((3,) if at else (2, 3)) and kind <= 3, "preamble")
        at += 16
        if kind <= 1:
            need(number <= 65536 and length <= 2**28 and (kind == 1) == (length > 524288), "lengths of a frame")
            message = decode_header(data[at : at + number])
            need(body_length(message.table) == length, "table and body")
            at += number
            if kind == 1:
                need(opened not in streams, "stream in use")
                streams[opened] = (message, length, bytearray())
                opened = (opened + 1) % 2**32
            else:
                messages.append(with_tensors(message, data[at : at + length]))
                at += length
            continue
        need(number in streams, "stream is open")
        message, whole, body = streams[number]
        if kind == 3:
            need(length == 0, "length of a reset")
            del streams[number]
            continue
        need(1 <= length <= 2**20 and len(body) + length <= whole, "length of a chunk")
        body += data[at : at + length]
        at += length
        if len(body) == whole:
            del streams[number]
            messages.append(with_tensors(message, bytes(body)))
    need(at == len(data) and not streams, "boundary")
    return messages


def decode_header(data: bytes) -> Message:
    """A canonical map with the fields of a message, and a table where there are tensors."""
    header = cbor2.loads(data)
    need(canonical(header) == data and type(header) is dict, "canonical map")
    table = header.pop("tensors", None)
    need(table != [], "no empty table")
    flag = FLAGS.get(header["type"])
    need(flag not in header or header[flag] is True, "flag")
    need(set(header) - {flag} == FIELDS[header["type"]], "fields")
    need(table is None or header["type"] in ("call", "partial", "reply"), "who carries tensors")
    return Message(header, table or [])


def canonical(value: Any) -> bytes:
    """The one encoding of a value."""
    match value:
        case None:
            return b"\xf6"
        case bool():
            return b"\xf5" if value else b"\xf4"
        case int():
            need(-(2**63) <= value < 2**64, "integer")
            return head(0, value) if value >= 0 else head(1, -1 - value)
        case float():
            need(not isnan(value), "NaN")
            if isinf(value):
                return b"\xf9\x7c\x00" if value > 0 else b"\xf9\xfc\x00"
            for first, form in ((b"\xf9", ">e"), (b"\xfa", ">f")):
                try:
                    if struct.unpack(form, packed := struct.pack(form, value))[0] == value:
                        return first + packed
                except OverflowError:
                    continue
            return b"\xfb" + struct.pack(">d", value)
        case bytes():
            return head(2, len(value)) + value
        case str():
            return head(3, len(value.encode())) + value.encode()
        case list():
            return head(4, len(value)) + b"".join(map(canonical, value))
        case dict():
            need(all(type(key) is str for key in value), "keys are strings")
            items = sorted((canonical(key), canonical(item)) for key, item in value.items())
            return head(5, len(value)) + b"".join(key + item for key, item in items)
    raise ValueError("type")


def head(major: int, argument: int) -> bytes:
    """Major type and argument, in the shortest form."""
    if argument < 24:
        return bytes([major << 5 | argument])
    for extra, form in ((24, ">B"), (25, ">H"), (26, ">I"), (27, ">Q")):
        if argument < 256 ** struct.calcsize(form):
            return bytes([major << 5 | extra]) + struct.pack(form, argument)
    raise ValueError("argument")


def payload_length(row: list[Any]) -> int:
    """Bytes that the tensor of a row takes in the body."""
    size = prod(row[1])
    if len(row) == 2:
        return size * ITEM_BYTES[row[0]]
    need(row[0] == "float32", "only float32 is compressed")
    return {"float16": 2 * size, "bfloat16": 2 * size, "blockwise8": size + 4 * (-(-size // BLOCK))}[row[2]]


def body_length(table: list[list[Any]]) -> int:
    """Length of the body that a table describes."""
    end = 0
    for row in table:
        if length := payload_length(row):
            end = -(-end // 64) * 64 + length
    return end


def with_tensors(message: Message, body: bytes) -> Message:
    """`message` with the tensors of `body`; gaps must be zero, which only a test asks."""
    end = 0
    for row in message.table:
        length = payload_length(row)
        start = -(-end // 64) * 64 if length else end
        need(not any(body[end:start]), "gaps are zero")
        end = start + length
        message.tensors.append(decode_tensor(row, body[start:end]).reshape(row[1]))
    need(end == len(body), "body")
    return message


def decode_tensor(row: list[Any], data: bytes) -> np.ndarray:
    """The elements of one tensor."""
    how = row[2] if len(row) == 3 else row[0]
    if how == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if how == "blockwise8":
        size = prod(row[1])
        scales = np.repeat(np.frombuffer(data[: len(data) - size], "<f4"), BLOCK)[:size]
        return np.frombuffer(data[len(data) - size :], "i1").astype(np.float32) / np.float32(127) * scales
    values = np.frombuffer(data, NUMPY[how])
    return values.astype(np.float32) if len(row) == 3 else values


def der(tag: int, *contents: bytes) -> bytes:
    """One element of a certificate, shorter than 256 bytes."""
    data = b"".join(contents)
    return bytes([tag, len(data)] if len(data) < 128 else [tag, 0x81, len(data)]) + data


def name(common_name: bytes) -> bytes:
    """A distinguished name with CN alone."""
    return der(0x30, der(0x31, der(0x30, bytes.fromhex("0603550403"), der(0x0C, common_name))))


def unsigned_leaf(public_key: bytes) -> bytes:
    """To-be-signed part of a peer's certificate (TBSCertificate), which the swarm signs."""
    ed25519 = der(0x30, bytes.fromhex("06032b6570"))
    peer_id = hashlib.sha256(public_key).digest()
    no_ca = der(0x30, bytes.fromhex("0603551d13"), b"\x01\x01\xff", der(0x04, der(0x30)))
    return der(
        0x30,
        der(0xA0, b"\x02\x01\x02"),
        der(0x02, bytes([peer_id[0] & 0x3F | 0x40]) + peer_id[1:16]),
        ed25519,
        name(b"swarm"),
        der(0x30, der(0x17, b"700101000000Z"), der(0x18, b"99991231235959Z")),
        name(b"peer"),
        der(0x30, ed25519, der(0x03, b"\0" + public_key)),
        der(0xA3, der(0x30, no_ca)),
    )


def swarm_seed(secret: bytes) -> bytes:
    """HKDF with SHA-256, RFC 5869, for 32 bytes."""
    key = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(key, b"dmoe_jax swarm key v1\x01", "sha256")
