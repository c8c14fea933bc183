"""Messages inside frames: each comes back as it was, and nothing else is taken for one."""

from typing import Any

import numpy as np
import pytest

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import PeerId
from dmoe_net.wire.frames import Frame
from dmoe_net.wire.messages import (
    MAX_CALL_ID,
    MAX_COMPRESSION_CHARACTERS,
    MAX_COMPRESSIONS,
    MAX_ERROR_CHARACTERS,
    MAX_METHOD_CHARACTERS,
    MAX_TIMEOUT_S,
    MAX_WINDOW_BYTES,
    MIN_WINDOW_BYTES,
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
from dmoe_net.wire.tensors import plain
from tests.net.wire_parts import read, wire

HELLO = Hello(peer_id=PeerId(bytes(range(32))), instance=b"instance", port=4001, window_bytes=2**26)

# The smallest and the largest of everything.
MESSAGES: list[Message] = [
    HELLO,
    Hello(
        peer_id=PeerId(bytes(32)),
        instance=bytes(8),
        port=None,
        window_bytes=MIN_WINDOW_BYTES,
        compressions=("c" * MAX_COMPRESSION_CHARACTERS,) * MAX_COMPRESSIONS,
    ),
    Hello(peer_id=PeerId(bytes(32)), instance=bytes(8), port=65535, host="h" * 255, window_bytes=MAX_WINDOW_BYTES),
    Hello(peer_id=PeerId(bytes(32)), instance=bytes(8), port=1, window_bytes=2**20, compressions=("float16",)),
    CallStart(call_id=1, method="dht.find", timeout_s=2.5, body={"key": b"k"}, tensors=(np.arange(3.0),)),
    CallStart(call_id=2, method="ü" * MAX_METHOD_CHARACTERS, timeout_s=MAX_TIMEOUT_S, body={}),
    CallStart(call_id=MAX_CALL_ID, method="m", timeout_s=5e-324, body={"tensors": []}),
    CallStart(call_id=3, method="m", timeout_s=1.0, body={}, tensors=(np.arange(3.0),), partials=True),
    CallPartial(call_id=1, body={"some": 1}, tensors=(np.arange(3.0),)),
    CallReply(call_id=MAX_CALL_ID, body={"ok": [1, None]}, tensors=()),
    CallReply(call_id=1, body={}, tensors=(np.arange(100_000.0), np.zeros((0, 2)))),
    *(CallError(call_id=3, kind=kind, message="full") for kind in ErrorKind),
    CallError(call_id=3, kind=ErrorKind.BUSY, message="x" * MAX_ERROR_CHARACTERS),
    CallError(call_id=3, kind=ErrorKind.FAILURE, message=""),
    CallCancel(call_id=4),
    Credit(nbytes=1),
    Credit(nbytes=MAX_WINDOW_BYTES),
    Ping(),
    Pong(),
    Goodbye(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_round_trip(message: Message) -> None:
    """Every message comes back as it was."""
    (frame,) = read(wire(encode_message(message)))
    got = parse_untrusted(frame)
    assert type(got) is type(message)
    for name in message.__dataclass_fields__:
        mine, theirs = getattr(message, name), getattr(got, name)
        if name == "tensors":
            assert [tensor.tolist() for tensor in theirs] == [plain(tensor).tolist() for tensor in mine]
        else:
            assert theirs == mine
            assert type(theirs) is type(mine)


def test_error_messages_are_cut_to_fit() -> None:
    """However long and odd an exception's text is, the error can be sent."""
    error = CallError(call_id=1, kind=ErrorKind.REFUSED, message="\ud800" + "x" * 10**6)
    (frame,) = read(wire(encode_message(error)))
    got = parse_untrusted(frame)
    assert isinstance(got, CallError)
    assert got.message == "?" + "x" * (MAX_ERROR_CHARACTERS - 1)


CALL = {"type": "call", "id": 1, "method": "m", "timeout_s": 1.0, "body": {}}
GREETING = {
    "type": "hello of wire version 3",
    "peer_id": bytes(32),
    "instance": bytes(8),
    "host": None,
    "port": None,
    "window": 2**20,
    "compressions": ["none"],
    "calls": 1,
    "software": "x",
}
ERROR = {"type": "error", "id": 1, "kind": "busy", "message": ""}


@pytest.mark.parametrize("header", [CALL, GREETING, ERROR], ids=lambda header: header["type"])
def test_what_the_malformed_ones_differ_from(header: dict[str, Any]) -> None:
    """The headers below are refused for their one fault: without it they are messages, with a field less they are
    not."""
    parse_untrusted(Frame(header=header))
    for missing in header:
        with pytest.raises(RemoteProtocolError):
            parse_untrusted(Frame(header={key: value for key, value in header.items() if key != missing}))


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"type": 1},
        {"type": None},
        {"type": ["call"]},
        {"type": "shutdown"},
        {"type": "Ping"},
        {"type": "ping", "id": 1},
        {"type": "pong", "body": {}},
        {"type": "goodbye", "extra": None},
        {"type": "cancel"},
        {"type": "cancel", "id": 1, "extra": 1},
        {"type": "cancel", "id": 0},
        {"type": "cancel", "id": -1},
        {"type": "cancel", "id": True},
        {"type": "cancel", "id": 1.0},
        {"type": "cancel", "id": MAX_CALL_ID + 1},
        {"type": "cancel", "id": "1"},
        {"type": "credit", "nbytes": 0},
        {"type": "credit", "nbytes": -1},
        {"type": "credit", "nbytes": True},
        {"type": "credit", "nbytes": 1.0},
        {"type": "credit", "nbytes": MAX_WINDOW_BYTES + 1},
        GREETING | {"peer_id": b"short"},
        GREETING | {"peer_id": "0" * 32},
        GREETING | {"instance": bytes(7)},
        GREETING | {"instance": "instance"},
        GREETING | {"host": ""},
        GREETING | {"host": "h" * 256},
        GREETING | {"host": 7},
        GREETING | {"host": "b\u00fccher.example"},
        GREETING | {"port": 0},
        GREETING | {"port": 65536},
        GREETING | {"port": True},
        GREETING | {"window": MIN_WINDOW_BYTES - 1},
        GREETING | {"window": MAX_WINDOW_BYTES + 1},
        GREETING | {"window": float(2**20)},
        GREETING | {"window": None},
        GREETING | {"compressions": None},
        GREETING | {"compressions": "float16"},
        GREETING | {"compressions": [1]},
        GREETING | {"compressions": [""]},
        GREETING | {"compressions": ["c" * (MAX_COMPRESSION_CHARACTERS + 1)]},
        GREETING | {"compressions": ["c"] * (MAX_COMPRESSIONS + 1)},
        GREETING | {"calls": 0},
        GREETING | {"calls": True},
        GREETING | {"software": ""},
        GREETING | {"software": "x" * 65},
        GREETING | {"extra": 1},
        CALL | {"method": ""},
        CALL | {"method": "m" * (MAX_METHOD_CHARACTERS + 1)},
        CALL | {"method": b"m"},
        CALL | {"timeout_s": 1},
        CALL | {"timeout_s": 0.0},
        CALL | {"timeout_s": -1.0},
        CALL | {"timeout_s": float("inf")},
        CALL | {"timeout_s": MAX_TIMEOUT_S * 2},
        CALL | {"body": []},
        CALL | {"body": None},
        CALL | {"extra": 1},
        {"type": "reply", "id": 1, "body": 5},
        ERROR | {"kind": "strange"},
        ERROR | {"kind": "BUSY"},
        ERROR | {"kind": ["busy"]},
        ERROR | {"message": None},
        ERROR | {"message": "x" * (MAX_ERROR_CHARACTERS + 1)},
    ],
    ids=repr,
)
def test_malformed_messages_are_refused(header: dict[str, Any]) -> None:
    """Unknown types, missing and additional fields, and values of the wrong type or range."""
    with pytest.raises(RemoteProtocolError):
        parse_untrusted(Frame(header=header))


@pytest.mark.parametrize("kind", ["cancel", "hello of wire version 3", "error", "credit", "ping", "pong", "goodbye"])
def test_tensors_only_where_they_belong(kind: str) -> None:
    """Only calls and replies carry tensors."""
    messages = [HELLO, CallError(call_id=1, kind=ErrorKind.BUSY, message=""), CallCancel(call_id=1), Credit(nbytes=1)]
    messages += [Ping(), Pong(), Goodbye()]
    headers = {header["type"]: header for header in (encode_message(message).frame.header for message in messages)}
    with pytest.raises(RemoteProtocolError, match="no tensors"):
        parse_untrusted(Frame(header=headers[kind], tensors=(np.zeros(1),)))
