"""Peers that misbehave on purpose: which faults there are, when they strike, and what happens then.

`open_rpc_peer(..., faults=FaultInjector(plan))` makes a peer whose answers go wrong, on whatever network it is. Chance
is repeatable: the n-th call of a caller meets the same fate in every run with the same seed.

    fault        what the peer does               what its caller gets
    refuse       answers that it will not         CallRefused
    hang         never answers                    PeerTimeout
    die          ends the connection inside the   ConnectionLost
                 answer
    garbage      answers bytes that are no frame  RemoteProtocolError
    late         answers after a while            the answer, or PeerTimeout
    wrong_shape  answers tensors of other shapes  the answer, to be checked by whoever reads it
"""

import enum
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import trio

from dmoe_net.chance import uniform
from dmoe_net.errors import CallRefused
from dmoe_net.identity import PeerId
from dmoe_net.rpc.base import Reply
from dmoe_net.wire.frames import MAGIC, PREAMBLE, VERSION, Frame, Part, PartKind
from dmoe_net.wire.tensors import plain

MAX_CALLERS = 4096
"""Callers whose calls are counted. Beyond it the counting starts afresh, which costs repeatability."""

_GARBAGE = b"HTTP/1.1 400 Bad Request\r\n\r\n"
_HEAD = PREAMBLE.pack(MAGIC, VERSION, PartKind.WHOLE, 100, 0)  # of a header of 100 bytes, which never come
_CUT_SHORT = Part(pieces=(_HEAD,), nbytes=len(_HEAD), frame=None)
# The frame, which is no message, is for a simulated link, which carries no bytes.
_NO_FRAME = Part(pieces=(_GARBAGE,), nbytes=len(_GARBAGE), frame=Frame(header={"type": "garbage"}))


class Fault(enum.StrEnum):
    """Faults of an answer; the table is at the head of this file."""

    REFUSE = "refuse"
    HANG = "hang"
    DIE = "die"
    GARBAGE = "garbage"
    LATE = "late"
    WRONG_SHAPE = "wrong_shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Rates of the faults."""

    rates: Mapping[Fault, float] = field(default_factory=dict)
    """Share of the calls that meet each fault; together at most 1."""
    late_mean_s: float = 1.0
    """Mean of the exponentially distributed delay of a late answer, seconds (Learning@home, section 4.2)."""
    methods: tuple[str, ...] | None = None
    """Methods that faults strike, by name or by prefix with a dot at its end ("expert."); None for all."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        if not all(0 <= rate <= 1 for rate in self.rates.values()) or sum(self.rates.values()) > 1 + 1e-9:
            raise ValueError(f"rates of faults must be shares of the calls, together at most 1, got {dict(self.rates)}")
        if not (math.isfinite(self.late_mean_s) and self.late_mean_s >= 0):
            raise ValueError(f"late_mean_s must be 0 or more seconds, got {self.late_mean_s!r}")

    @classmethod
    def parse(cls, texts: tuple[str, ...], *, seed: int = 0) -> "FaultPlan":
        """Read `FAULT=RATE`, or `late=RATE:MEAN_S`, the form of the command line; ValueError names any other text."""
        rates: dict[Fault, float] = {}
        late_mean_s = 1.0
        for text in texts:
            name, equals, numbers = text.partition("=")
            rate, colon, mean_s = numbers.partition(":")
            try:
                fault = Fault(name)
                if not equals or fault in rates or (colon and fault is not Fault.LATE):
                    raise ValueError
                rates[fault] = float(rate)
                late_mean_s = float(mean_s) if colon else late_mean_s
            except ValueError:
                known = ", ".join(fault.value for fault in Fault)
                raise ValueError(
                    f"expected FAULT=RATE or late=RATE:MEAN_S, each fault once, with a fault of {known}; got {text!r}"
                ) from None
        return cls(rates=rates, late_mean_s=late_mean_s, seed=seed)


class FaultInjector:
    """Decides the fate of each call that a peer serves.

    Args:
      plan: the rates of faults.
      server: the peer, or None: of no peer yet, see `of`. Peers under one plan have fates of their own; otherwise all
        experts that a caller asks at once would fail together.
    """

    def __init__(self, plan: FaultPlan, server: PeerId | None = None) -> None:
        self._plan = plan
        self._server = b"" if server is None else server.raw
        self._num_calls: dict[PeerId, int] = {}

    def of(self, server: PeerId) -> "FaultInjector":
        """A fresh injector for this peer under the same plan."""
        return FaultInjector(self._plan, server)

    def draw(self, caller: PeerId, method: str) -> tuple[Fault, float] | None:
        """The fault of the caller's next call, and the delay of a late answer in seconds; None for none."""
        plan = self._plan
        if plan.methods is not None and not any(
            method.startswith(name) if name.endswith(".") else method == name for name in plan.methods
        ):
            return None
        if len(self._num_calls) >= MAX_CALLERS and caller not in self._num_calls:
            self._num_calls.clear()
        number = self._num_calls.get(caller, 0)
        self._num_calls[caller] = number + 1
        left = uniform(plan.seed, self._server, caller.raw, number, "fault")
        for fault in Fault:  # in the order of the enum, whatever the mapping's
            left -= plan.rates.get(fault, 0.0)
            if left < 0:
                late_s = -plan.late_mean_s * math.log1p(-uniform(plan.seed, self._server, caller.raw, number, "late"))
                return fault, late_s if fault is Fault.LATE else 0.0
        return None


async def misbehave(
    fault: Fault, late_s: float, serve: Callable[[], Awaitable[Reply]], send_last: Callable[[Part], None]
) -> Reply:
    """Serve a call that a fault strikes: `serve` runs the handler, `send_last` sends one more part on the connection
    and then ends it."""
    match fault:
        case Fault.REFUSE:
            raise CallRefused("refused on purpose")
        case Fault.HANG:
            await trio.sleep_forever()
        case Fault.LATE:
            await trio.sleep(late_s)
    reply = await serve()
    match fault:
        case Fault.DIE | Fault.GARBAGE:
            send_last(_CUT_SHORT if fault is Fault.DIE else _NO_FRAME)
            await trio.sleep_forever()  # the end of the connection ends this
        case Fault.WRONG_SHAPE:
            return Reply(body=reply.body, tensors=tuple(plain(tensor)[None] for tensor in reply.tensors))
    return reply
