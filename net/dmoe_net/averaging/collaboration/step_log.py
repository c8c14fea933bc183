"""Averages of the last steps, for newcomers whose state was overtaken while they fetched it.

Theory of operation. A large state may take longer to fetch than the swarm takes for a step, and whoever fetched it
again and again would never be in step. So a newcomer asks somebody who is further, before it fetches the state and
every second until it has it, for the averages of the steps that are made meanwhile: each is a part of the state (a
third of it, with Adam), and the state of before with these is the state of now. Being asked is what makes a peer keep
averages, the last few of them: where nobody joins, nothing is kept.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import trio

from dmoe_net.averaging.collaboration.progress import CHAIN_BYTES, MAX_SAMPLES, MAX_STEP
from dmoe_net.averaging.collaboration.rounds import Averaged
from dmoe_net.averaging.window import BulkWindow
from dmoe_net.dht.calls import PEER_ERRORS
from dmoe_net.errors import CallRefused, RemoteProtocolError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.rpc.base import Caller, Reply, Request, handlers, read_request
from dmoe_net.types import Array
from dmoe_net.wire.fields import Field, integer, octets, real, row_untrusted, rows
from dmoe_net.wire.tensors import plain

MAX_KEPT = 4
"""Averages that are kept at most, by whoever gives them and by whoever takes them: each is as large as the model."""
KEEP_S = 30.0
"""Seconds after a question for which a peer keeps its averages."""
POLL_S = 1.0
"""Seconds between two questions of a newcomer."""
MAX_ASKED = 4
"""Peers that it asks in turn, while the ones before fail."""

_PIECE = 2**18
"""Numbers in a piece."""
_START_PIECES = 4
_TIMEOUT_S = 30.0
_NUMBER, _CHAIN, _GROUP_ID = integer(0, MAX_STEP), octets(CHAIN_BYTES, CHAIN_BYTES), octets(1, 64)
_PLACE, _LENGTH = integer(0, 2**40), integer(1, 2**22)
_ASKED: dict[str, Field[Any]] = {"number": _NUMBER, "group": _GROUP_ID, "start": _PLACE, "length": _LENGTH}
_WEIGHT, _NOTES = real(0.0, 1024 * MAX_SAMPLES), real(-1e15, 1e15)


class StepLog:
    """Keeps this peer's last steps while somebody asks for them, and serves them.

    Args:
      caller: serves the calls. prefix: of the collaboration.
    """

    def __init__(self, caller: Caller, *, prefix: str) -> None:
        self._caller = caller
        self._methods = _methods(prefix)
        self._kept: dict[int, tuple[bytes, Averaged]] = {}  # number -> the chain before, and what was brought
        self._asked_at = -math.inf

    def keep(self, number: int, chain_before: bytes, brought: Averaged) -> None:
        """Take note of a step that this peer has made. Its mean must not be written to any more."""
        self._forget()
        if trio.current_time() - self._asked_at < KEEP_S:
            self._kept[number] = chain_before, brought
            for number in list(self._kept)[:-MAX_KEPT]:
                del self._kept[number]

    async def run(self) -> None:
        listing, piece = self._methods
        with handlers(self._caller, {listing: self._serve_list, piece: self._serve_piece}):
            while True:
                await trio.sleep(KEEP_S)
                self._forget()

    def _forget(self) -> None:
        if trio.current_time() - self._asked_at >= KEEP_S:
            self._kept.clear()

    async def _serve_list(self, request: Request) -> Reply:
        after = read_request(request, after=_NUMBER)[0]
        self._asked_at = trio.current_time()
        kept = [(number, *each) for number, each in self._kept.items() if number > after]
        steps = [[number, chain, each.group_id, each.weight, each.notes] for number, chain, each in kept]
        return Reply(body={"steps": steps})

    async def _serve_piece(self, request: Request) -> Reply:
        number, group_id, start, length = read_request(request, **_ASKED)
        self._asked_at = trio.current_time()
        _, brought = self._kept.get(number, (b"", None))
        if brought is None or brought.group_id != group_id:
            raise CallRefused(f"this peer has not kept step {number}")
        part = brought.mean[start : start + length]
        if part.size != length:
            raise CallRefused(f"step {number} has {brought.mean.size} numbers, asked for {start} to {start + length}")
        return Reply(tensors=(part,))


@dataclass(kw_only=True, eq=False)
class StepFollower:
    """Fetches what is brought to the steps that others make, beside something else."""

    caller: Caller
    prefix: str
    """Names the collaboration."""
    size: int
    """Numbers in a mean."""
    donors: Callable[[], Sequence[Contact]]
    """Returns who may be asked, the best first. Whoever was asked last is asked again, as long as it is among them: it
    keeps what it will bring, and the others need not."""

    def __post_init__(self) -> None:
        self._listing, self._piece = _methods(self.prefix)
        self._after = 0
        self._keeper: PeerId | None = None  # who answered last, and so keeps its steps
        self._found: dict[tuple[int, bytes], Averaged] = {}
        self._turn = trio.Lock()

    async def ask(self) -> None:
        """Fetch what is new now. Returns when everything has come that somebody had, or nobody answers."""
        async with self._turn:
            donors = sorted(self.donors(), key=lambda each: each.peer_id != self._keeper)
            for donor in donors[:MAX_ASKED]:
                try:
                    await self._fetch_news(donor)
                    self._keeper = donor.peer_id
                    return
                except PEER_ERRORS:
                    continue

    def following(self, step: int, chain: bytes) -> Averaged | None:
        """Return the step after this one of this chain, if it has come. Steps before it are forgotten."""
        self._after = max(self._after, step)
        self._found = {key: each for key, each in self._found.items() if key[0] > step}
        return self._found.get((step + 1, chain))

    def forget(self) -> None:
        self._found.clear()

    async def _fetch_news(self, donor: Contact) -> None:
        reply = await self.caller.call(donor, self._listing, {"after": self._after}, timeout_s=_TIMEOUT_S)
        for row in rows(MAX_KEPT).of_untrusted(reply.body, "steps"):
            number, chain, group_id, weight, notes = row_untrusted(
                row, "a step", number=_NUMBER, chain=_CHAIN, group=_GROUP_ID, weight=_WEIGHT, notes=_NOTES
            )
            if number <= self._after or (number, chain) in self._found or len(self._found) >= MAX_KEPT:
                continue
            mean = await self._fetch(donor, number, group_id)
            self._found[number, chain] = Averaged(mean=mean, weight=weight, notes=notes, group_id=group_id)

    async def _fetch(self, donor: Contact, number: int, group_id: bytes) -> Array:
        """Fetch all pieces of one mean, or raise the first `NetError`."""
        mean = np.empty(self.size, np.float32)

        async def fetch(start: int) -> None:
            length = min(_PIECE, self.size - start)
            body = {"number": number, "group": group_id, "start": start, "length": length}
            reply = await self.caller.call(donor, self._piece, body, timeout_s=_TIMEOUT_S, bulk_bytes=4 * length)
            mean[start : start + length] = _numbers_untrusted(reply, length)

        window = BulkWindow.towards(self.caller.bulk, donor.peer_id, start_bytes=4 * _START_PIECES * _PIECE)
        await window.move(range(0, self.size, _PIECE), 4 * _PIECE, fetch)
        return mean


def _numbers_untrusted(reply: Reply, length: int) -> Array:
    if len(reply.tensors) != 1:
        raise RemoteProtocolError(f"expected one tensor, got {len(reply.tensors)}")
    numbers = plain(reply.tensors[0])
    if numbers.dtype != np.float32 or numbers.shape != (length,) or not np.isfinite(numbers).all():
        raise RemoteProtocolError(f"expected {length} finite numbers of float32, got {numbers.dtype} {numbers.shape}")
    return numbers


def _methods(prefix: str) -> tuple[str, str]:
    return f"averaging.{prefix}.steps", f"averaging.{prefix}.steps.piece"
