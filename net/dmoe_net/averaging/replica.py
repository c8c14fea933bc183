"""The processes that hold one model together, and take part in averages as one peer.

Theory of operation. Where a model lies on the devices of several processes (`jax.distributed`), each averages the
pieces that it has with the same process of the other replicas: a grid of piece by peer, in which nobody holds a whole
model. Process 0 *leads*: it alone looks for groups, reports and votes, and other replicas know no other. Whatever the
processes must do alike they *agree* on: each gives its value under one mark, and gets the values of all. So what one
decides, or fails at, all of them know at the same place in their programs.

A replica that loses a process is none: whoever notices raises `ReplicaLost`, and the others see the connection end.

    averaging.NAME.replica.agree        {mark, value} -> {values}        of the replica's own processes
    averaging.NAME.replica.stay         {} -> {} when the other leaves
    averaging.NAME.replica.processes    {} -> {contacts}                 of everybody: who has the other pieces
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import trio

from dmoe_net.averaging.grouping.group import Group
from dmoe_net.dht.calls import PEER_ERRORS
from dmoe_net.dht.messages import contact_to_wire, parse_contact_untrusted
from dmoe_net.errors import CallRefused, NetError, PeerTimeout, PeerUnavailable, RemoteProtocolError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.nursery import background_nursery
from dmoe_net.rpc.base import Caller, Reply, Request, handlers, read_request
from dmoe_net.wire.fields import rows, text

MAX_PROCESSES = 1024
"""Processes of a replica. Their contacts travel in one message."""

_MARK = text(1, 128)
_LONG_S = 3600.0
"""Seconds of a call that waits for another process: it may compile for minutes. It is placed again after them."""
_ASK_S = 10.0
_LEAVE_S = 5.0
_MEET_S = 120.0
_MAX_KNOWN = 1024
"""Other replicas whose processes are remembered."""


class ReplicaLost(NetError):
    """A process of this replica is gone: the others cannot go on without its part of the model."""


@dataclass(eq=False, slots=True)
class _Case:
    """Values that processes have given under one mark."""

    values: dict[int, Any] = field(default_factory=dict)
    is_whole: trio.Event = field(default_factory=trio.Event)
    asked: int = 0
    """Other processes that wait for the values of all."""
    is_answered: trio.Event = field(default_factory=trio.Event)


@dataclass(kw_only=True, eq=False)
class Replica:
    """One process's end of its replica. Made by `open_replica`."""

    caller: Caller
    name: str
    contacts: tuple[Contact, ...]
    """The processes in order; the first leads."""
    index: int
    """Number of this one among them."""

    def __post_init__(self) -> None:
        self._known: dict[PeerId, tuple[Contact, ...]] = {}
        self._left = trio.Event()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was agreed on, and that a process was not there."""
        self._cases: dict[str, _Case] = {}
        self._numbers: dict[str, int] = {}
        self._lost, self._why_lost = trio.Event(), ""

    @property
    def leads(self) -> bool:
        """True for process 0."""
        return self.index == 0

    @property
    def size(self) -> int:
        return len(self.contacts)

    async def agree(self, mark: str, value: Any = None) -> list[Any]:
        """Give a value, and return those of all processes in their order, once all have given theirs.

        Args:
          mark: names the occasion. All processes name the same ones, each in the same order.
          value: what a body of a call can hold.

        Raises:
          ReplicaLost: a process is gone.
        """
        number = self._numbers[mark] = self._numbers.get(mark, 0) + 1
        mark = f"{mark}#{number}"
        if not self.leads:
            return await self._ask_leader(mark, value)
        case = self._case(mark, 0, value)
        try:
            async with background_nursery() as nursery:
                nursery.start_soon(self._cancel_when_lost, nursery.cancel_scope)
                await case.is_answered.wait()
        finally:
            self._cases.pop(mark, None)
        if not case.is_whole.is_set():
            raise ReplicaLost(self._why_lost)
        # A training loop may now stand still until the others do their part of a program: their answers must have left.
        for contact in self.contacts[1:]:
            await self.caller.written(contact.peer_id)
        return [case.values[index] for index in range(self.size)]

    async def decided(self, mark: str, value: Any = None) -> Any:
        """Return the leader's value, once all processes have come to this point; see `agree`."""
        return (await self.agree(mark, value))[0]

    def forget(self, mark: str) -> None:
        """Forget an occasion that does not come again."""
        self._numbers.pop(mark, None)

    async def wait_until_lost(self) -> str:
        """Wait until a process is gone that has not left in order, and return a sentence that says so."""
        await self._lost.wait()
        return self._why_lost

    async def processes_of(self, leader: Contact | PeerId) -> tuple[Contact, ...]:
        """Return the contacts of all processes of another replica, which has as many as this one.

        Raises:
          PeerUnavailable, CallFailed, RemoteProtocolError: it does not say.
        """
        peer_id = leader if isinstance(leader, PeerId) else leader.peer_id
        if peer_id == self.contacts[0].peer_id:
            return self.contacts
        if (known := self._known.get(peer_id)) is not None:
            return known
        reply = await self.caller.call(leader, f"{self._prefix}.processes", {}, timeout_s=_ASK_S)
        items = rows(MAX_PROCESSES).of_untrusted(reply.body, "contacts")
        found = tuple(parse_contact_untrusted(item) for item in items)
        if len(found) != self.size or found[0].peer_id != peer_id or len({each.peer_id for each in found}) < self.size:
            raise RemoteProtocolError(f"expected {self.size} processes of which {peer_id.short} is the first")
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[peer_id] = found
        return found

    async def parts_of(self, group: Group) -> list[list[list[object]]] | None:
        """For each member of a group of leaders the contacts of its processes, as they travel; None if one does not
        say."""
        found: dict[int, tuple[Contact, ...]] = {}

        async def ask(place: int) -> None:
            member = group.members[place]
            with suppress(*PEER_ERRORS):
                found[place] = await self.processes_of(member.peer_id if member.address is None else member.contact)

        async with trio.open_nursery() as nursery:
            for place in range(len(group.members)):
                nursery.start_soon(ask, place)
        if len(found) < len(group.members):
            return None
        return [list(map(contact_to_wire, found[place])) for place in range(len(group.members))]

    def part_of(self, group: Group, parts: Sequence[Sequence[object]]) -> Group:
        """The group of this process: process k of each member of a group of leaders."""
        contacts = [parse_contact_untrusted(part[self.index]) for part in parts]
        members = tuple(
            replace(member, peer_id=contact.peer_id, address=contact.address)
            for member, contact in zip(group.members, contacts, strict=True)
        )
        return replace(group, members=members)

    @property
    def _prefix(self) -> str:
        return f"averaging.{self.name}.replica"

    def _case(self, mark: str, index: int, value: Any) -> _Case:
        case = self._cases.setdefault(mark, _Case())
        case.values[index] = value
        if len(case.values) == self.size:
            case.is_whole.set()
        return case

    async def _ask_leader(self, mark: str, value: Any) -> list[Any]:
        body = {"mark": mark, "value": value}
        while True:
            try:
                reply = await self.caller.call(self.contacts[0], f"{self._prefix}.agree", body, timeout_s=_LONG_S)
            except PeerTimeout:
                continue
            except (PeerUnavailable, CallRefused) as error:
                self._lose(f"process 0 of this replica is gone: {error}")
                raise ReplicaLost(self._why_lost) from error
            values = rows(self.size).of_untrusted(reply.body, "values")
            if len(values) != self.size:
                raise RemoteProtocolError(f"expected {self.size} values, got {len(values)}")
            return values

    async def _serve_agree(self, request: Request) -> Reply:
        index = self._index_of(request.peer_id)
        mark = read_request(request, mark=_MARK)[0]
        case = self._case(mark, index, request.body.get("value"))
        case.asked += 1
        try:
            while not case.is_whole.is_set():
                if self._lost.is_set():
                    raise CallRefused(self._why_lost)
                with trio.move_on_after(0.5):
                    await case.is_whole.wait()
        finally:
            case.asked -= 1
            if case.is_whole.is_set() and not case.asked:
                case.is_answered.set()
            if not case.is_whole.is_set():  # the caller has given up
                case.values.pop(index, None)
                if not case.values:
                    self._cases.pop(mark, None)
        return Reply(body={"values": [case.values[place] for place in range(self.size)]})

    async def _serve_stay(self, request: Request) -> Reply:
        self._index_of(request.peer_id)
        await self._left.wait()
        return Reply()

    async def _serve_processes(self, request: Request) -> Reply:
        del request
        return Reply(body={"contacts": list(map(contact_to_wire, self.contacts))})

    def _index_of(self, peer_id: PeerId) -> int:
        for index, contact in enumerate(self.contacts):
            if contact.peer_id == peer_id:
                return index
        raise CallRefused("you are no process of this replica")

    async def _cancel_when_lost(self, scope: trio.CancelScope) -> None:
        await self._lost.wait()
        scope.cancel()

    def _lose(self, why: str) -> None:
        if not self._lost.is_set():
            self._why_lost = why
            self._lost.set()

    async def watch(self, index: int) -> None:
        """Return when another process has left in order; note it if it is gone otherwise."""
        while True:
            try:
                await self.caller.call(self.contacts[index], f"{self._prefix}.stay", {}, timeout_s=_LONG_S)
            except PeerTimeout:
                continue
            except PEER_ERRORS as error:
                self._lose(f"process {index} of this replica is gone: {error}")
            return

    async def leave(self) -> None:
        """Wait until all processes are about to leave, so that none takes another for lost."""
        with trio.move_on_after(_LEAVE_S), suppress(NetError):
            await self.agree("leave")
            self._left.set()
            if self.leads:  # answers to the others are under way until they say that they have left
                async with trio.open_nursery() as nursery:
                    for index in range(1, self.size):
                        nursery.start_soon(self.watch, index)


@asynccontextmanager
async def open_replica(caller: Caller, *, name: str, contacts: Sequence[Contact], index: int) -> AsyncIterator[Replica]:
    """This process's part in its replica, as long as the block lasts.

    Args:
      name: names what is averaged; one replica for each name and caller.
      contacts: of all processes in order, this one included.
      index: number of this process.

    Raises:
      ReplicaLost: the others do not come.
    """
    if not 2 <= len(contacts) <= MAX_PROCESSES:
        raise ValueError(f"a replica has 2 to {MAX_PROCESSES} processes, got {len(contacts)}")
    replica = Replica(caller=caller, name=name, contacts=tuple(contacts), index=index)
    prefix = replica._prefix
    served = {
        f"{prefix}.agree": replica._serve_agree,
        f"{prefix}.stay": replica._serve_stay,
        f"{prefix}.processes": replica._serve_processes,
    }
    with handlers(caller, served, max_concurrent=4 * MAX_PROCESSES):
        await _meet(replica)
        async with background_nursery() as nursery:
            for other in range(len(contacts)) if replica.leads else [0]:
                if other != index:
                    nursery.start_soon(replica.watch, other)
            yield replica
            await replica.leave()


async def _meet(replica: Replica) -> None:
    """Wait until all processes serve. Whoever comes before the leader does asks again."""
    with trio.move_on_after(_MEET_S):
        while True:
            with suppress(ReplicaLost):
                await replica.agree("meet")
                return
            replica.begin_anew()
            await trio.sleep(0.05)
    raise ReplicaLost(f"the other processes of this replica did not come within {_MEET_S:g} s")
