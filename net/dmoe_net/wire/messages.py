"""The messages of the RPC layer, and their form inside a frame.

A message travels as a frame whose header is a flat map: `"type"` names the message, the other keys are its fields,
and the tensors ride in the frame's body. Both ends send `Hello` first. Every call is numbered by its caller, upwards
from one on each connection; its `CallStart` is answered by at most one `CallReply` or `CallError`, or is called off
by a `CallCancel`. A call that takes partials may get parts of its answer ahead of that, in a `CallPartial` each. Since
frames arrive in the order in which they were completed, calls do not arrive in the order of
their ids. The two directions of a connection are independent.

The type of a hello names the version of the wire format that its sender speaks, and its frame has a form that no
version changes: so each end can read the other's version, whatever it is, and tell its user both.

`Credit` gives room in the window back (`dmoe_net.rpc.outbox`), `Ping` asks for a `Pong` at any time, and `Goodbye`
announces that its sender places no more calls: once both have said it and all calls are answered, the connection is
closed.
"""

import enum
import ipaddress
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from dmoe_net.errors import LocalProtocolError, RemoteProtocolError, VersionMismatch
from dmoe_net.identity import PeerId
from dmoe_net.wire.fields import (
    HOST,
    MAPPING,
    PEER_ID,
    PORT,
    Field,
    choice,
    integer,
    octets,
    optional,
    real,
    several,
    text,
)
from dmoe_net.wire.frames import HELLO_VERSION, VERSION, EncodedFrame, Frame, encode_frame
from dmoe_net.wire.tensors import Outgoing
from dmoe_net.wire.versions import CALLS, MAX_VERSION, SOFTWARE, versions_differ

MAX_CALL_ID = 2**63 - 1
MAX_METHOD_CHARACTERS = 128
"""Names are short; the bound keeps a peer from filling our log with one."""

MAX_ERROR_CHARACTERS = 1000
"""Longer messages are cut: an error must always fit into a header, and into a log line."""

MIN_WINDOW_BYTES = 2**16
MAX_WINDOW_BYTES = 2**40

INSTANCE_BYTES = 8
"""Enough that a process started again never draws the same."""

MAX_COMPRESSIONS = 16
MAX_COMPRESSION_CHARACTERS = 32
"""Names in a `Hello`: a peer may know compressions that we do not."""

MAX_SOFTWARE_CHARACTERS = 64

MAX_TIMEOUT_S = 24 * 3600.0
"""A handler of a peer that vanished lives no longer than this."""


class ErrorKind(enum.StrEnum):
    """Why a call failed at the peer, in the words of the wire."""

    REFUSED = "refused"  # the request was wrong: dmoe_net.errors.CallRefused
    BUSY = "busy"  # a bounded queue was full, nothing was done: PeerBusy
    FAILURE = "failure"  # the handler crashed: RemoteFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Introduction of the sender. The first message in each direction, and never sent again.

    Attributes:
      peer_id: the sender. A claim on a plain connection; an encrypted one proves it, and the two must agree.
      instance: drawn when the sender's process started: tells a second connection from a restart.
      port: where the sender listens; None in client mode.
      host: where the sender is reached, if not on the host that it calls from: it knows better behind a router that
        forwards ports, or in a container's network. A claim; who dials it checks who answers.
      window_bytes: how much the other end may send ahead, see `dmoe_net.rpc.outbox`.
      compressions: names of the compressions that the sender can undo.
      calls: version of what the sender's calls and DHT records say, see `dmoe_net.wire.versions`.
      software: name and version of the sender's program, for people.
      lane: this connection is a further one beside the one that there is, see `dmoe_net.rpc.lanes`. Said only to a peer
        that is known to understand it.
    """

    peer_id: PeerId
    instance: bytes
    port: int | None
    window_bytes: int
    host: str | None = None
    compressions: tuple[str, ...] = ()
    calls: int = CALLS
    software: str = SOFTWARE
    lane: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStart:
    """A request.

    Attributes:
      call_id: greater than that of every call placed before in this direction.
      method: what is called.
      timeout_s: how long the caller will still wait, seconds; more than 0, at most `MAX_TIMEOUT_S`.
      body, tensors: small and large arguments.
      partials: the caller takes parts of the answer as they become ready.
    """

    call_id: int
    method: str
    timeout_s: float
    body: Mapping[str, Any]
    tensors: tuple[Outgoing, ...] = ()
    partials: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReply:
    """The answer to the call `call_id`: small results in `body`, large ones in `tensors`."""

    call_id: int
    body: Mapping[str, Any]
    tensors: tuple[Outgoing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPartial:
    """Part of the answer to the call `call_id`, which asked for such; the `CallReply` or `CallError` comes later."""

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


Message = Hello | CallStart | CallReply | CallPartial | CallError | CallCancel | Credit | Ping | Pong | Goodbye


_CALL_ID = integer(1, MAX_CALL_ID)
_METHOD = text(1, MAX_METHOD_CHARACTERS)
_SOFTWARE = text(1, MAX_SOFTWARE_CHARACTERS)
_COMPRESSIONS = several(text(1, MAX_COMPRESSION_CHARACTERS), MAX_COMPRESSIONS)

_FIELDS: dict[type[Message], dict[str, tuple[str, Field[Any]]]] = {
    Hello: {
        "peer_id": ("peer_id", PEER_ID),
        "instance": ("instance", octets(INSTANCE_BYTES, INSTANCE_BYTES)),
        "host": ("host", optional(HOST)),
        "port": ("port", optional(PORT)),
        "window": ("window_bytes", integer(MIN_WINDOW_BYTES, MAX_WINDOW_BYTES)),
        "compressions": ("compressions", _COMPRESSIONS),
        "calls": ("calls", integer(1, MAX_VERSION)),
        "software": ("software", _SOFTWARE),
    },
    CallStart: {
        "id": ("call_id", _CALL_ID),
        "method": ("method", _METHOD),
        "timeout_s": ("timeout_s", real(math.nextafter(0.0, 1.0), MAX_TIMEOUT_S)),  # above 0
        "body": ("body", MAPPING),
    },
    CallReply: {"id": ("call_id", _CALL_ID), "body": ("body", MAPPING)},
    CallPartial: {"id": ("call_id", _CALL_ID), "body": ("body", MAPPING)},
    CallError: {
        "id": ("call_id", _CALL_ID),
        "kind": ("kind", choice(ErrorKind)),
        "message": ("message", text(0, MAX_ERROR_CHARACTERS)),
    },
    CallCancel: {"id": ("call_id", _CALL_ID)},
    Credit: {"nbytes": ("nbytes", integer(1, MAX_WINDOW_BYTES))},
    Ping: {},
    Pong: {},
    Goodbye: {},
}
"""Field on the wire -> (attribute of the message, its kind)."""

_HELLO_OF_VERSION = re.compile(r"hello(?: of wire version ([1-9]\d{0,8}))?")
"""Types of hellos; the hello of version 2 says no number."""

_TYPES: dict[str, type[Message]] = {
    f"hello of wire version {VERSION}": Hello,
    "call": CallStart,
    "reply": CallReply,
    "partial": CallPartial,
    "error": CallError,
    "cancel": CallCancel,
    "credit": Credit,
    "ping": Ping,
    "pong": Pong,
    "goodbye": Goodbye,
}
_NAMES = {kind: name for name, kind in _TYPES.items()}
_KEYS = {kind: frozenset({"type", *fields}) for kind, fields in _FIELDS.items()}

_FLAGS: dict[type[Message], str] = {Hello: "lane", CallStart: "partials"}
"""A key of a message, and its attribute, that is there with the value true or not at all."""

_WITH_TENSORS = (CallStart, CallReply, CallPartial)


def check_announced(host: str, what: str = "announce") -> None:
    """Check that others can be told to call a host.

    Args:
      what: names the value in the message.

    Raises:
      ValueError: it is no host name or IP address, has a port or brackets, or is every address of a machine.
    """
    is_address, is_every = False, False
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        is_address, is_every = True, address.is_unspecified
    if not HOST.holds(host) or is_every or any(sign in host for sign in "@[]/ ") or (":" in host and not is_address):
        raise ValueError(f"{what} must be a host name or an address, without a port, got {host!r}")


def error_text(text: str) -> str:
    """The text of an exception as it can travel: it may be long, and hold lone surrogates, which UTF-8 cannot
    express."""
    return text[:MAX_ERROR_CHARACTERS].encode("utf-8", "replace").decode()


def encode_message(message: Message) -> EncodedFrame:
    """The frame that carries `message`.

    Raises:
      LocalProtocolError: the body or a tensor cannot be sent, or is too large.
    """
    kind = type(message)
    header = {key: field.pack(getattr(message, name)) for key, (name, field) in _FIELDS[kind].items()}
    header["type"] = _NAMES[kind]
    flag = _FLAGS.get(kind)
    if flag is not None and getattr(message, flag):
        header[flag] = True
    if isinstance(message, CallStart) and not _METHOD.holds(message.method):
        raise LocalProtocolError(f"a method has 1 to {MAX_METHOD_CHARACTERS} characters, got {message.method!r:.200}")
    if isinstance(message, CallError):
        header["message"] = error_text(message.message)
    encoded = encode_frame(header, message.tensors if isinstance(message, _WITH_TENSORS) else ())
    return replace(encoded, version=HELLO_VERSION) if kind is Hello else encoded


def parse_untrusted(frame: Frame) -> Message:
    """The message that `frame` carries.

    Raises:
      RemoteProtocolError: it is none of ours: unknown type, missing or additional fields, a value out of
        range.
      VersionMismatch: it is the hello of another version of the wire format.
    """
    name = frame.header.get("type")
    kind = _TYPES.get(name) if type(name) is str else None
    if kind is None:
        if type(name) is str and (hello := _HELLO_OF_VERSION.fullmatch(name)):
            theirs, said = int(hello[1] or HELLO_VERSION), frame.header.get("software")
            software = str(said) if _SOFTWARE.holds(said) else ""
            raise VersionMismatch(versions_differ("the wire format", theirs, VERSION, software=software))
        raise RemoteProtocolError(f"unknown message type {str(name)[:32]!r}")
    flag = _FLAGS.get(kind)
    is_flagged = flag is not None and frame.header.get(flag) is True
    if frame.header.keys() != (_KEYS[kind] | {flag} if is_flagged else _KEYS[kind]):
        raise RemoteProtocolError(f"message {name!r} must have the fields {', '.join(sorted(_KEYS[kind]))}")
    values = {
        attribute: field.read_untrusted(frame.header[key], key) for key, (attribute, field) in _FIELDS[kind].items()
    }
    if flag is not None:
        values[flag] = is_flagged
    if kind in _WITH_TENSORS:
        values["tensors"] = frame.tensors
    elif frame.tensors:
        raise RemoteProtocolError(f"message {name!r} carries no tensors")
    return kind(**values)
