"""Reading other peers' copies of records: by changes, and a large one's pages at once.

Theory of operation. The first look at a copy gives its first page and says where the others begin, which are then asked
for all at once. Of several copies one of the largest has to come whole. Later looks ask for what changed since. What
was read is remembered while it lives, so that a holder that lacks an entry does not take it away.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import trio

from dmoe_net.dht.calls import PEER_ERRORS, DhtCalls
from dmoe_net.dht.copies import Copies, Position
from dmoe_net.dht.entries import Entry
from dmoe_net.dht.messages import MAX_PAGES, FindReply
from dmoe_net.dht.routing_table import NodeId
from dmoe_net.dht.storage import NO_ROOM, EntryStorage
from dmoe_net.identity import Contact, PeerId
from dmoe_net.nursery import for_each


class RecordReader:
    """Reads others' copies for a node, and remembers from whom and how far."""

    def __init__(self, calls: DhtCalls) -> None:
        self._calls, self._clock, self._config = calls, calls.clock, calls.config
        self.entries = EntryStorage(max_bytes=self._config.max_storage_bytes)
        """Entries that were read, while they live."""
        self.holders = Copies(life_s=self._config.holders_life_s)
        """The peers that had copies, and how far these were read."""
        self._unread: dict[tuple[NodeId, PeerId], tuple[Position, ...]] = {}  # pages of copies that were begun

    async def find(self, contact: Contact, target: NodeId, *, contacts: int, record: bool) -> FindReply:
        """Ask a peer for contacts and for what changed in its copy of the record, and remember what it says."""
        since = self.holders.position(target, contact.peer_id) if record else None
        found = await self._calls.find(contact, target, contacts=contacts, record=record, since=since)
        self._note(contact, target, found, is_kept=self._keep(contact, target, found))
        return found

    def _keep(self, contact: Contact, target: NodeId, found: FindReply) -> bool:
        """Remember the entries of a peer's answer; False if one could not be kept, or is of another time than this
        clock's: it is read again the next time."""
        now, lives = self._clock.now(), list[tuple[Entry, float]]()
        lives += ((entry, entry.left(now, said_s)) for entry, said_s in found.entries)
        living = [each for each in lives if each[1] > 0]
        verdicts = self.entries.store(target, living, account=contact.peer_id, now=self._clock.ticks(), swarm_now=now)
        return len(living) == len(lives) and NO_ROOM not in verdicts

    def _note(self, contact: Contact, target: NodeId, found: FindReply, *, is_kept: bool) -> None:
        """Note how far a peer's copy was read, and the pages that follow."""
        if found.pages:
            self._unread[target, contact.peer_id] = found.pages
        else:
            self._unread.pop((target, contact.peer_id), None)
        if found.position is not None and is_kept:
            self.holders.read(target, contact.peer_id, found.position)

    async def read_changes(self, target: NodeId) -> bool:
        """Read what changed in the record at a remembered holder; return False if a walk is needed."""
        holders = self.holders.holders(target, trio.current_time())
        if not holders:
            return False
        # In turn: one that holds something back, or that writers have left, hides it for no longer than until the next.
        holder = self.holders.next_holder(target)
        self._unread.pop((target, holder.peer_id), None)
        holds = await self.read_copy(holder, target)
        if not holds:
            self.holders.forget(target)
        return holds

    async def read_copy(self, contact: Contact, target: NodeId, patience_s: float | None = None) -> bool:
        """Read all that changed in a peer's copy: the first page, then all others at once. False if it has none, fails,
        or takes longer for either than it has been seen to take."""
        if patience_s is None:
            patience_s = self._calls.patience.of(contact.peer_id, trio.current_time())
        with trio.move_on_after(patience_s) as scope:
            try:
                for _ in range(MAX_PAGES):
                    pages = self._unread.get((target, contact.peer_id))
                    if pages is None:
                        found = await self.find(contact, target, contacts=0, record=True)
                    else:
                        found = await self._read_pages(contact, target, pages)
                    if not found.pages:
                        return found.position is not None
                    scope.deadline = min(scope.deadline + patience_s, trio.current_time() + self._config.rpc_timeout_s)
            except PEER_ERRORS:
                return False
            return True
        return False

    async def _read_pages(self, contact: Contact, target: NodeId, pages: Sequence[Position]) -> FindReply:
        """Read several pages of a peer's copy at once; return the last that left no gap before it."""
        answers, errors, are_kept = dict[Position, FindReply](), list[Exception](), list[bool]()

        async def ask(since: Position) -> None:
            try:
                answers[since] = await self._calls.find(contact, target, contacts=0, record=True, since=since)
            except PEER_ERRORS as error:
                errors.append(error)
            else:
                are_kept.append(self._keep(contact, target, answers[since]))

        await for_each(ask, pages)
        if errors:
            raise errors[0]
        found = answers[pages[0]]
        for since in pages[1:]:
            # A page reaches as far as was said, unless the peer has lost its copy or counts anew.
            if not found.pages or found.pages[0].epoch != since.epoch or found.pages[0].change < since.change:
                break
            found = answers[since]
        self._note(contact, target, found, is_kept=all(are_kept))
        return found

    @asynccontextmanager
    async def reading_on(self, target: NodeId, *, all_copies: bool) -> AsyncIterator[Callable[[Contact], None]]:
        """Read on, while a walk finds copies of a record, until one of the largest has come whole, or all
        have if `all_copies`.

        A holder that takes longer than it has been seen to take is waited for only if no copy of several pages comes
        whole: part of a record would look like all of it. The rest of a copy is read when its holder is asked again.

        Yields: a function to be called with each holder of whose copy pages follow.
        """
        begun, whole = dict[Contact, int](), [0]  # numbers of pages that followed the first
        is_walked = False

        async def read(holder: Contact, patience_s: float | None = None) -> None:
            if await self.read_copy(holder, target, patience_s):
                whole.append(begun[holder])
            if is_walked and not all_copies and is_read():
                nursery.cancel_scope.cancel()

        def is_read() -> bool:
            return max(whole) == max(begun.values(), default=0)

        def read_on(holder: Contact) -> None:
            begun[holder] = len(self._unread[target, holder.peer_id])
            nursery.start_soon(read, holder)

        async with trio.open_nursery() as nursery:
            yield read_on
            is_walked = True
            if not all_copies and is_read():
                nursery.cancel_scope.cancel()
        if begun and len(whole) == 1:
            async with trio.open_nursery() as nursery:
                for holder in begun:
                    if (target, holder.peer_id) in self._unread:
                        nursery.start_soon(read, holder, self._config.rpc_timeout_s)
        self._unread = {copy: pages for copy, pages in self._unread.items() if copy[0] != target}
