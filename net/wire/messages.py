"""The messages of the RPC layer, and their form inside a frame.

A message travels as a frame whose header is a flat map: `"type"` names the message, the other keys are its fields,
and the tensors ride in the frame's body. Both ends send `Hello` first. Every call is numbered by its caller, upwards
from one on each connection; its `CallStart` is answered by at most one `CallReply` or `CallError`, or is called off
by a `CallCancel`. Since frames arrive in the order in which they were completed, calls do not arrive in the order of
their ids. The two directions of a connection are independent.

`Credit` gives room in the window back (`net.rpc.outbox`), `Ping` asks for a `Pong` at any time, and `Goodbye` announces
that its sender places no more calls: once both have said it and all calls are answered, the connection is closed.
"""

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from net.errors import LocalProtocolError, RemoteProtocolError
from net.identity import PEER_ID_BYTES, PeerId
from net.wire.frames import EncodedFrame, Frame, encode_frame
from net.wire.tensors import Outgoing

MAX_CALL_ID = 2**63 - 1
MAX_METHOD_CHARACTERS = 128
"""Names are short; the bound keeps a peer from filling our log with one."""

MAX_ERROR_CHARACTERS = 1000
"""Longer messages are cut: an error must always fit into a header, and into a log line."""

MIN_WINDOW_BYTES = 2**16
MAX_WINDOW_BYTES = 2**40

INSTANCE_BYTES = 8
"""Enough that a process started again never draws the same."""

MAX_HOST_CHARACTERS = 255
"""RFC 1035 section 2.3.4."""

MAX_COMPRESSIONS = 16
MAX_COMPRESSION_CHARACTERS = 32
"""Names in a `Hello`: a peer may know compressions that we do not."""

MAX_TIMEOUT_S = 24 * 3600.0
"""A handler of a peer that vanished lives no longer than this."""


class ErrorKind(enum.StrEnum):
    """Why a call failed at the peer, in the words of the wire."""

    REFUSED = "refused"  # the request was wrong: net.errors.CallRefused
    BUSY = "busy"  # a bounded queue was full, nothing was done: PeerBusy
    FAILURE = "failure"  # the handler crashed: RemoteFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who speaks. The first message in each direction, and never sent again.

    Attributes:
      peer_id: the sender. A claim on a plain connection; an encrypted one proves it, and the two must agree.
      instance: drawn when the sender's process started: tells a second connection from a restart.
      port: where the sender listens; None in client mode.
      host: where the sender is reached, if not on the host that it calls from: it knows better behind a router that
        forwards ports, or in a container's network. A claim; who dials it checks who answers.
      window_bytes: how much the other end may send ahead, see `net.rpc.outbox`.
      compressions: names of the compressions that the sender can undo.
    """

    peer_id: PeerId
    instance: bytes
    port: int | None
    window_bytes: int
    host: str | None = None
    compressions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStart:
    """A request.

    Attributes:
      call_id: greater than that of every call placed before in this direction.
      method: what is called.
      timeout_s: how long the caller will still wait, seconds; more than 0, at most `MAX_TIMEOUT_S`.
      body: small arguments.
      tensors: large arguments.
    """

    call_id: int
    method: str
    timeout_s: float
    body: Mapping[str, Any]
    tensors: tuple[Outgoing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReply:
    """The answer to the call `call_id`: small results in `body`, large ones in `tensors`."""

    call_id: int
    body: Mapping[str, Any]
    tensors: tuple[Outgoing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """The call `call_id` failed at the peer; `message` is for people."""

    call_id: int
    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCancel:
    """The caller no longer waits for `call_id`. There is no answer to it."""

    call_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Frames that counted for `nbytes` in the window were dealt with: as much may be sent again."""

    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Are you there?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """The answer to `Ping`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The sender places no more calls on this connection. Sent at most once."""


Message = Hello | CallStart | CallReply | CallError | CallCancel | Credit | Ping | Pong | Goodbye


def is_host(value: Any) -> bool:
    """Whether this may stand for a host: what DHT records may say of one too, or an honest peer that passes it on
    would break their rules."""
    return type(value) is str and 1 <= len(value) <= MAX_HOST_CHARACTERS and value.isascii()


def encode_message(message: Message) -> EncodedFrame:
    """The frame that carries `message`.

    Raises:
      LocalProtocolError: the body or a tensor cannot be sent, or is too large.
    """
    header: dict[str, Any]
    match message:
        case Hello():
            header = {
                "type": "hello",
                "peer_id": message.peer_id.raw,
                "instance": message.instance,
                "host": message.host,
                "port": message.port,
                "window": message.window_bytes,
                "compressions": list(message.compressions),
            }
            return encode_frame(header)
        case CallStart():
            if not 1 <= len(message.method) <= MAX_METHOD_CHARACTERS:
                raise LocalProtocolError(
                    f"a method has 1 to {MAX_METHOD_CHARACTERS} characters, got {message.method!r:.200}"
                )
            header = {
                "type": "call",
                "id": message.call_id,
                "method": message.method,
                "timeout_s": float(message.timeout_s),
                "body": dict(message.body),
            }
            return encode_frame(header, message.tensors)
        case CallReply():
            return encode_frame({"type": "reply", "id": message.call_id, "body": dict(message.body)}, message.tensors)
        case CallError():
            # An exception's text may hold lone surrogates, which UTF-8 cannot express.
            text = message.message[:MAX_ERROR_CHARACTERS].encode("utf-8", "replace").decode()
            header = {"type": "error", "id": message.call_id, "kind": message.kind.value, "message": text}
            return encode_frame(header)
        case CallCancel():
            return encode_frame({"type": "cancel", "id": message.call_id})
        case Credit():
            return encode_frame({"type": "credit", "nbytes": message.nbytes})
        case Ping():
            return encode_frame({"type": "ping"})
        case Pong():
            return encode_frame({"type": "pong"})
        case Goodbye():
            return encode_frame({"type": "goodbye"})


def parse_untrusted(frame: Frame) -> Message:
    """The message that `frame` carries.

    Raises:
      RemoteProtocolError: it is none of ours: unknown type, missing or additional fields, a value out of
        range.
    """
    kind = frame.header.get("type")
    entry = _PARSERS.get(kind) if type(kind) is str else None
    if entry is None:
        raise RemoteProtocolError(f"unknown message type {str(kind)[:32]!r}")
    fields, carries_tensors, parse = entry
    if frame.header.keys() != fields:
        raise RemoteProtocolError(f"message {kind!r} must have the fields {', '.join(sorted(fields))}")
    if frame.tensors and not carries_tensors:
        raise RemoteProtocolError(f"message {kind!r} carries no tensors")
    return parse(frame)


def _parse_hello(frame: Frame) -> Hello:
    raw, port = frame.header["peer_id"], frame.header["port"]
    if type(raw) is not bytes or len(raw) != PEER_ID_BYTES:
        raise RemoteProtocolError(f"peer_id must be {PEER_ID_BYTES} bytes")
    if port is not None and (type(port) is not int or not 1 <= port <= 65535):
        raise RemoteProtocolError("port must be an integer from 1 to 65535, or null")
    host = frame.header["host"]
    if host is not None and not is_host(host):
        raise RemoteProtocolError(f"host must be a string of 1 to {MAX_HOST_CHARACTERS} ASCII characters, or null")
    instance, window_bytes = frame.header["instance"], frame.header["window"]
    if type(instance) is not bytes or len(instance) != INSTANCE_BYTES:
        raise RemoteProtocolError(f"instance must be {INSTANCE_BYTES} bytes")
    if type(window_bytes) is not int or not MIN_WINDOW_BYTES <= window_bytes <= MAX_WINDOW_BYTES:
        raise RemoteProtocolError(f"window must be an integer from {MIN_WINDOW_BYTES} to {MAX_WINDOW_BYTES}")
    return Hello(
        peer_id=PeerId(raw),
        instance=instance,
        port=port,
        host=host,
        window_bytes=window_bytes,
        compressions=_compressions(frame.header["compressions"]),
    )


def _compressions(names: Any) -> tuple[str, ...]:
    if (
        type(names) is not list
        or len(names) > MAX_COMPRESSIONS
        or not all(type(name) is str and 1 <= len(name) <= MAX_COMPRESSION_CHARACTERS for name in names)
    ):
        raise RemoteProtocolError(
            f"compressions must be at most {MAX_COMPRESSIONS} names of 1 to {MAX_COMPRESSION_CHARACTERS} characters"
        )
    return tuple(names)


def _parse_call(frame: Frame) -> CallStart:
    method, timeout_s = frame.header["method"], frame.header["timeout_s"]
    if type(method) is not str or not 1 <= len(method) <= MAX_METHOD_CHARACTERS:
        raise RemoteProtocolError(f"method must be a string of 1 to {MAX_METHOD_CHARACTERS} characters")
    if type(timeout_s) is not float or not (math.isfinite(timeout_s) and 0 < timeout_s <= MAX_TIMEOUT_S):
        raise RemoteProtocolError(f"timeout_s must be a float above 0 and up to {MAX_TIMEOUT_S:g}")
    return CallStart(
        call_id=_call_id(frame), method=method, timeout_s=timeout_s, body=_body(frame), tensors=frame.tensors
    )


def _parse_reply(frame: Frame) -> CallReply:
    return CallReply(call_id=_call_id(frame), body=_body(frame), tensors=frame.tensors)


def _parse_error(frame: Frame) -> CallError:
    kind, text = frame.header["kind"], frame.header["message"]
    if type(kind) is not str or kind not in ErrorKind.__members__.values():
        raise RemoteProtocolError("unknown kind of error")
    if type(text) is not str or len(text) > MAX_ERROR_CHARACTERS:
        raise RemoteProtocolError(f"an error's message must be a string of at most {MAX_ERROR_CHARACTERS} characters")
    return CallError(call_id=_call_id(frame), kind=ErrorKind(kind), message=text)


def _parse_cancel(frame: Frame) -> CallCancel:
    return CallCancel(call_id=_call_id(frame))


def _parse_credit(frame: Frame) -> Credit:
    nbytes = frame.header["nbytes"]
    if type(nbytes) is not int or not 1 <= nbytes <= MAX_WINDOW_BYTES:
        raise RemoteProtocolError(f"nbytes must be an integer from 1 to {MAX_WINDOW_BYTES}")
    return Credit(nbytes=nbytes)


def _parse_ping(_: Frame) -> Ping:
    return Ping()


def _parse_pong(_: Frame) -> Pong:
    return Pong()


def _parse_goodbye(_: Frame) -> Goodbye:
    return Goodbye()


def _call_id(frame: Frame) -> int:
    call_id = frame.header["id"]
    if type(call_id) is not int or not 1 <= call_id <= MAX_CALL_ID:
        raise RemoteProtocolError(f"id must be an integer from 1 to {MAX_CALL_ID}")
    return call_id


def _body(frame: Frame) -> dict[str, Any]:
    body = frame.header["body"]
    if type(body) is not dict:
        raise RemoteProtocolError("body must be a map")
    return body


_PARSERS: dict[str, tuple[frozenset[str], bool, Callable[[Frame], Message]]] = {
    "hello": (
        frozenset({"type", "peer_id", "instance", "host", "port", "window", "compressions"}),
        False,
        _parse_hello,
    ),
    "call": (frozenset({"type", "id", "method", "timeout_s", "body"}), True, _parse_call),
    "reply": (frozenset({"type", "id", "body"}), True, _parse_reply),
    "error": (frozenset({"type", "id", "kind", "message"}), False, _parse_error),
    "cancel": (frozenset({"type", "id"}), False, _parse_cancel),
    "credit": (frozenset({"type", "nbytes"}), False, _parse_credit),
    "ping": (frozenset({"type"}), False, _parse_ping),
    "pong": (frozenset({"type"}), False, _parse_pong),
    "goodbye": (frozenset({"type"}), False, _parse_goodbye),
}
"""Type on the wire -> (its fields, whether tensors may come with it, its parser)."""
