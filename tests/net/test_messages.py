"""Messages inside frames: each comes back as it was, and nothing else is taken for one."""

from dataclasses import replace
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
SHORT = Hello(peer_id=PeerId(bytes(32)), instance=bytes(8), port=None, window_bytes=MIN_WINDOW_BYTES)

# The smallest and the largest of everything.
MESSAGES: list[Message] = [
    HELLO,
    replace(SHORT, compressions=("c" * MAX_COMPRESSION_CHARACTERS,) * MAX_COMPRESSIONS),
    replace(SHORT, port=65535, host="h" * 255, window_bytes=MAX_WINDOW_BYTES),
    replace(SHORT, port=1, window_bytes=2**20, compressions=("float16",)),
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
]
MESSAGES += [CallCancel(call_id=4), Credit(nbytes=1), Credit(nbytes=MAX_WINDOW_BYTES), Ping(), Pong(), Goodbye()]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_round_trip(message: Message) -> None:
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
    assert parse_untrusted(frame).message == "?" + "x" * (MAX_ERROR_CHARACTERS - 1)


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


CANCEL, CREDIT = {"type": "cancel", "id": 1}, {"type": "credit", "nbytes": 1}


@pytest.mark.parametrize("header", [CALL, GREETING, ERROR, CANCEL, CREDIT], ids=lambda header: header["type"])
def test_what_the_malformed_ones_differ_from(header: dict[str, Any]) -> None:
    """Without their one fault the headers below are messages, with a field less they are not."""
    parse_untrusted(Frame(header=header))
    for missing in header:
        with pytest.raises(RemoteProtocolError):
            parse_untrusted(Frame(header={key: value for key, value in header.items() if key != missing}))


WRONG: list[tuple[dict[str, Any], str, list[Any]]] = [
    (CANCEL, "id", [0, -1, True, 1.0, MAX_CALL_ID + 1, "1"]),
    (CREDIT, "nbytes", [0, -1, True, 1.0, MAX_WINDOW_BYTES + 1]),
    (GREETING, "peer_id", [b"short", "0" * 32]),
    (GREETING, "instance", [bytes(7), "instance"]),
    (GREETING, "host", ["", "h" * 256, 7, "b\u00fccher.example"]),
    (GREETING, "port", [0, 65536, True]),
    (GREETING, "window", [MIN_WINDOW_BYTES - 1, MAX_WINDOW_BYTES + 1, float(2**20), None]),
    (GREETING, "compressions", [None, "float16", [1], [""]]),
    (GREETING, "compressions", [["c" * (MAX_COMPRESSION_CHARACTERS + 1)], ["c"] * (MAX_COMPRESSIONS + 1)]),
    (GREETING, "calls", [0, True]),
    (GREETING, "software", ["", "x" * 65]),
    (CALL, "method", ["", "m" * (MAX_METHOD_CHARACTERS + 1), b"m"]),
    (CALL, "timeout_s", [1, 0.0, -1.0, float("inf"), MAX_TIMEOUT_S * 2]),
    (CALL, "body", [[], None]),
    (ERROR, "kind", ["strange", "BUSY", ["busy"]]),
    (ERROR, "message", [None, "x" * (MAX_ERROR_CHARACTERS + 1)]),
    *((header, "extra", [1]) for header in (CANCEL, GREETING, CALL)),
]
MALFORMED: list[dict[str, Any]] = [header | {field: value} for header, field, values in WRONG for value in values]
MALFORMED += [{}, {"type": 1}, {"type": None}, {"type": ["call"]}, {"type": "shutdown"}, {"type": "Ping"}]
MALFORMED += [{"type": "ping", "id": 1}, {"type": "pong", "body": {}}, {"type": "goodbye", "extra": None}]
MALFORMED += [{"type": "reply", "id": 1, "body": 5}]


@pytest.mark.parametrize("header", MALFORMED, ids=repr)
def test_malformed_messages_are_refused(header: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_untrusted(Frame(header=header))


WITHOUT_TENSORS = [message for message in MESSAGES if not hasattr(message, "tensors")]


@pytest.mark.parametrize("message", WITHOUT_TENSORS, ids=lambda message: type(message).__name__)
def test_tensors_only_where_they_belong(message: Message) -> None:
    """Only calls and replies carry tensors."""
    header = encode_message(message).frame.header
    with pytest.raises(RemoteProtocolError, match="no tensors"):
        parse_untrusted(Frame(header=header, tensors=(np.zeros(1),)))
