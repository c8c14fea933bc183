"""Telling the swarm how far this peer is, and reading how far the others are: `progress` over the DHT.

Reports are written and read more often as the batch fills. Whoever sees first that the batch is about to be full tells
all others that can be called (`begin`), so that nobody misses the step because its own reading of the DHT was a little
older; clients see it by themselves. So does whoever comes to where the others are, for steps may be shorter than the
time between two readings. Question and answer carry the report of whoever sends them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import trio

from dmoe_net.averaging.collaboration.progress import (
    MAX_PEERS,
    MAX_SKEW_S,
    Forecast,
    Report,
    forecast,
    parse_report_untrusted,
    progress_key,
    report_to_wire,
    reports_in_untrusted,
)
from dmoe_net.dht.calls import PEER_ERRORS
from dmoe_net.dht.node import DhtNode
from dmoe_net.errors import CallRefused, RemoteProtocolError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.rpc.base import Caller, Reply, Request, handlers
from dmoe_net.rpc.liveness import call_living
from dmoe_net.wire.fields import optional, real

MIN_PERIOD_S, MAX_PERIOD_S = 1.0, 5.0
"""Seconds between two reports: when the batch is nearly full, and at most."""
LIFETIME_S = 15.0
"""Seconds for which a report stands. A peer that has died is counted on for so long, unless its group notices."""


@dataclass(kw_only=True, eq=False)
class ProgressBoard:
    """This peer's view of a collaboration."""

    caller: Caller
    """Serves and places the calls."""
    dht: DhtNode
    """The reports are there."""
    prefix: str
    """Names the collaboration."""
    own: Callable[[], Report | None]
    """Returns this peer's report, of now; None: it brings nothing for so long that others are not to count on it."""
    target: float
    """Samples of a whole batch."""
    silence_s: float
    """A peer that is told to begin, and gives no sign of life for so long, is gone."""
    on_begin: Callable[[int, bytes, float | None], float | None]
    """Called with a step, its chain and the swarm time at which it begins somewhere, None if nobody has told of any;
    returns when it begins here, None: it does not."""

    def __post_init__(self) -> None:
        self._key = progress_key(self.prefix)
        self._method = f"averaging.{self.prefix}.begin"
        self._others: tuple[Report, ...] = ()
        self._gone: dict[PeerId, float] = {}
        self._changed = trio.Event()
        self._wanted = trio.Event()
        self._last: Report | None = None
        self._listed: dict[PeerId, float] = {}  # until when the reports live that the DHT listed at the last reading
        self._is_withdrawn = False

    def _now(self) -> Report:
        self._last = self.own() or self._last
        assert self._last is not None  # whoever begins reports
        return self._last

    @property
    def contacts(self) -> tuple[Contact, ...]:
        """Contacts of the others at this step, and of those who would help them."""
        view = self.view
        return _contacts((*view.others, *view.helpers))

    @property
    def ahead(self) -> tuple[Contact, ...]:
        """Contacts of those who are further, the furthest first."""
        return _contacts(each for each in self.view.ahead if each.gathers)

    @property
    def view(self) -> Forecast:
        """The swarm as of the last reading, extrapolated to now."""
        return forecast(self._now(), self._known(), target=self.target, now=self.dht.clock.now())

    async def wait_for_news(self) -> None:
        """Wait until the DHT was read again."""
        await self._changed.wait()

    def refresh(self) -> None:
        """Report and read at once: something has changed."""
        self._wanted.set()

    def forget(self, peer_id: PeerId) -> None:
        """Count no more on a peer that did not answer, unless it reports again."""
        self._gone[peer_id] = self.dht.clock.now()

    def advanced(self, members: Iterable[PeerId], step: int, chain: bytes) -> None:
        """Count these peers, which have made a step with us, as beginning the next batch now."""
        now, moved = self.dht.clock.now(), set(members)
        self._others = tuple(
            replace(each, step=step, chain=chain, samples=0.0, at=now) if each.peer_id in moved else each
            for each in self._others
        )

    async def run(self) -> None:
        """Report and read until cancelled, then take the report back."""
        with handlers(self.caller, {self._method: self._serve_begin}):
            try:
                while True:
                    wanted = self._wanted = trio.Event()
                    await self._report()
                    await self._read()
                    with trio.move_on_after(self._period()):
                        await wanted.wait()
            finally:
                with trio.move_on_after(1.0, shield=True):
                    await self.dht.withdraw(self._key)

    async def tell(self, at: float | None) -> float:
        """Tell everybody at this step who can be called that this peer is at it, too, and that it begins at swarm time
        `at` if that is known. One that begins at another time says so, which is as if it had told us.

        Returns: seconds that the slowest of those who answered took; 0 if nobody did.
        """
        own, began = self._now(), trio.current_time()
        body = {"report": report_to_wire(own), "at": at}
        slowest = 0.0

        async def call(contact: Contact) -> None:
            nonlocal slowest
            try:
                reply = await call_living(
                    self.caller, contact, self._method, body, silence_s=self.silence_s, timeout_s=LIFETIME_S
                )
                theirs = self._read_untrusted(reply.body, contact.peer_id)[1]
            except PEER_ERRORS:
                self.forget(contact.peer_id)
                return
            slowest = max(slowest, trio.current_time() - began)
            if theirs is not None and theirs != at:
                self.on_begin(own.step, own.chain, theirs)

        async with trio.open_nursery() as nursery:
            for contact in self.contacts:
                nursery.start_soon(call, contact)
        return slowest

    def _known(self) -> list[Report]:
        oldest = self.dht.clock.now() - LIFETIME_S
        return [each for each in self._others if each.at > max(oldest, self._gone.get(each.peer_id, oldest))]

    def _period(self) -> float:
        view = self.view
        # Those who have just begun have to see each other before they see an end.
        left = view.ends_at - self.dht.clock.now() if view.rate else 0.0
        return min(max(left / 4, MIN_PERIOD_S), MAX_PERIOD_S)

    async def _report(self) -> None:
        own = self.own()
        if own is not None:
            own = replace(own, at=self.dht.clock.now())
            await self.dht.store(self._key, report_to_wire(own), life_s=LIFETIME_S)
        elif not self._is_withdrawn:
            await self.dht.withdraw(self._key)
        self._is_withdrawn = own is None

    async def _read(self) -> None:
        found = await self.dht.get(self._key)
        listed, now = {entry.owner: entry.ends_at for entry in found}, self.dht.clock.ticks()
        # A report that has ended, and one that could not be stored again, were not taken back.
        withdrawn = {owner for owner, ends_at in self._listed.items() if owner not in listed and ends_at > now}
        self._listed = listed
        self._learn(reports_in_untrusted(found, now=self.dht.clock.now()), withdrawn)

    def _learn(self, reports: Iterable[Report], withdrawn: Iterable[PeerId] = ()) -> None:
        """Take in what is news of these reports, and wake up whoever waits for news."""
        found = {each.peer_id: each for each in self._known()}
        for report in reports:
            known = found.get(report.peer_id)
            # What we know of a peer may be newer than what it last reported, see `advanced`; and a lookup may miss one.
            is_news = len(found) < MAX_PEERS if known is None else (known.step, known.at) < (report.step, report.at)
            if report.peer_id != self.caller.peer_id and is_news:
                found[report.peer_id] = report
        for peer_id in withdrawn:
            found.pop(peer_id, None)
        self._others = tuple(found.values())
        self._gone = {peer_id: at for peer_id, at in self._gone.items() if peer_id in found}
        self._changed.set()
        self._changed = trio.Event()

    def _read_untrusted(self, body: Mapping[str, Any], peer_id: PeerId) -> tuple[Report, float | None]:
        """Take in the report of a question or an answer; return it, and the time at which the step begins there."""
        report = parse_report_untrusted(body.get("report"), peer_id)
        at, later_s = optional(real()).of_untrusted(body, "at"), report.at - self.dht.clock.now()
        if later_s > MAX_SKEW_S:
            raise RemoteProtocolError(f"expected a report of now, got one of {later_s:.0f} s later")
        self._learn([report])
        return report, at

    async def _serve_begin(self, request: Request) -> Reply:
        try:
            report, at = self._read_untrusted(request.body, request.peer_id)
        except RemoteProtocolError as error:
            raise CallRefused(str(error)) from error
        own = self.own()
        if own is None:
            raise CallRefused("this peer brings nothing now")
        begins_at = self.on_begin(report.step, report.chain, at)
        return Reply(body={"report": report_to_wire(own), "at": begins_at})


def _contacts(reports: Iterable[Report]) -> tuple[Contact, ...]:
    """Contacts of those of them that can be called."""
    return tuple(Contact(each.peer_id, each.address) for each in reports if each.address is not None)
