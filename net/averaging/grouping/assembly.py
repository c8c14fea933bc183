"""Finding groups over the network: what a peer serves and declares, one search after the other."""

import math
import random
from contextlib import ExitStack
from dataclasses import dataclass

import trio

from net.averaging.grouping.group import MAX_GROUP_SIZE, Group, Member, Role
from net.averaging.grouping.group_key import MoshpitGrid, group_key
from net.averaging.grouping.join_messages import (
    BANDWIDTHS_BPS,
    MAX_SCHEMA_BYTES,
    WEIGHTS,
    Candidate,
    JoinRequest,
    Reason,
    Refusal,
    accepted_body,
    declaration_of,
    group_body,
    parse_request_untrusted,
    refusal_body,
)
from net.averaging.grouping.matchmaking import AssemblyConfig, Matchmaking
from net.averaging.grouping.search import GroupSearch
from net.dht.node import DhtNode
from net.errors import CallRefused, RemoteProtocolError
from net.rpc.base import Caller, Reply, Request, handlers

_NOT_LOOKING = Refusal(reason=Reason.NOT_LOOKING)

_PLACES_TO_SPARE = 16
"""Calls of `join` beyond a group's members: of followers whose earlier call, on a lost connection, has not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Declaration:
    """What the DHT holds of us under a key."""

    key: str
    declared: float
    """Our declared expiration."""


class GroupAssembler:
    """Finds a peer's groups, one after the other; in between it tells others that it does not look for one.

    Args:
      caller: serves `averaging.PREFIX.ask` and `.join`, for one assembler of a prefix at a time.
      dht: where peers that look for a group meet.
      prefix: what is averaged, see `group_key`.
      grid: whose groups are looked for.
      schema: at most 64 bytes that tell what the vector means, such as a hash of names and shapes. Peers of other
        schemas are refused.
      rng: draws group ids.
      config: of all searches.
      is_client: serve nothing, and never lead; implied when `caller` listens nowhere.

    Raises:
      ValueError: the schema is too long, the grid has no groups of `min_group_size`, the prefix has a dot, or the
        caller serves it already.
    """

    def __init__(
        self,
        caller: Caller,
        dht: DhtNode,
        *,
        prefix: str,
        grid: MoshpitGrid,
        schema: bytes,
        rng: random.Random,
        config: AssemblyConfig,
        is_client: bool | None = None,
    ) -> None:
        if not prefix or "." in prefix:
            raise ValueError(f"a prefix is a name without a dot, got {prefix!r}")
        if len(schema) > MAX_SCHEMA_BYTES:
            raise ValueError(f"a schema has at most {MAX_SCHEMA_BYTES} bytes, got {len(schema)}")
        if grid.side < config.min_group_size:
            raise ValueError(f"a grid of side {grid.side} has no groups of min_group_size {config.min_group_size}")
        self._caller = caller
        self._dht = dht
        self._prefix = prefix
        self._grid = grid
        self._schema = schema
        self._rng = rng
        self._config = config
        self._is_client = caller.address is None or bool(is_client)
        self._ask_method, self._join_method = f"averaging.{prefix}.ask", f"averaging.{prefix}.join"
        self._search: GroupSearch | None = None
        self._last: _Declaration | None = None
        # By key, when our last entry ends. Those that have ended are dropped at each search, so there are no more than
        # searches begun within a window.
        self._ends: dict[str, float] = {}
        self._served = ExitStack()
        if not self._is_client:
            # At most `side` followers of either kind wait, see `Matchmaking`.
            max_waiting = min(2 * grid.side, MAX_GROUP_SIZE) + _PLACES_TO_SPARE
            self._served.enter_context(handlers(caller, {self._ask_method: self._serve_ask}))
            join = {self._join_method: self._serve_join}
            self._served.enter_context(handlers(caller, join, max_concurrent=max_waiting))

    def close(self) -> None:
        """Serve no more calls."""
        self._served.close()

    async def find_group(self, me: Member, *, cell: int, round_number: int, deadline: float) -> Group | None:
        """Assemble a group with other peers of our cell's group in this round.

        What was declared in the DHT stands until its window ends, and costs others a question each; call `withdraw`
        while the group is at work to spare them that. If cancelled, the declaration is withdrawn (this takes up to
        `withdrawal_timeout_s`) and followers are sent away.

        Args:
          me: what the group is to know of us.
          cell, round_number: our place on the grid, and which of its axes; see `MoshpitGrid`.
          deadline: swarm time.

        Returns:
          the group, the same for all of its members; or None, by the deadline, if there were too few others.

        Raises:
          ValueError: `me` is not this peer, or not as a group could use it.
          RuntimeError: another search is under way.
        """
        self._check(me)
        if self._search is not None:
            raise RuntimeError("an assembler looks for one group at a time")
        now = self._dht.clock.now()
        if deadline <= now:
            await trio.lowlevel.checkpoint()
            return None
        core = Matchmaking(
            me,
            key=group_key(self._prefix, self._grid, cell, round_number),
            schema=self._schema,
            side=self._grid.side,
            deadline=deadline,
            config=self._config,
            rng=self._rng,
            now=now,
        )
        search = self._search = GroupSearch(
            core,
            caller=self._caller,
            dht=self._dht,
            config=self._config,
            ask_method=self._ask_method,
            join_method=self._join_method,
            declare=self._declare,
        )
        self._ends = {key: end for key, end in self._ends.items() if end > now}
        is_finished = False
        try:
            group = await search.run(deadline)
            is_finished = True
        finally:
            self._search = None
            if not is_finished:
                with trio.move_on_after(self._config.withdrawal_timeout_s, shield=True):
                    await self.withdraw()
        return group

    async def withdraw(self) -> None:
        """Take back what the last search declared, if others can still see it; nothing while there is a next one."""
        if self._search is not None:
            return
        last, self._last = self._last, None
        if last is not None and last.declared > self._dht.clock.now():
            await self._store(last.key, None, 0.0)

    async def _declare(self, core: Matchmaking) -> bool:
        """Bring our declared expiration into the DHT; whether it is there."""
        # Before the store: if that is cancelled half-way, this is what has to be withdrawn.
        self._last = _Declaration(key=core.key, declared=core.expiration)
        declaration = declaration_of(Candidate(contact=core.me.contact, expiration=core.expiration))
        return await self._store(core.key, declaration, core.expiration)

    async def _store(self, key: str, value: object, expiration: float) -> bool:
        # The DHT takes an entry only if it ends later than the one before it, even if we gather for a shorter time.
        end = max(expiration, math.nextafter(self._ends.get(key, 0.0), math.inf))
        self._ends[key] = end
        return await self._dht.store(key, value, subkey=str(self._caller.peer_id), expiration=end)

    async def _serve_ask(self, request: Request) -> Reply:
        wanted = _parse(request)
        answer = _NOT_LOOKING if self._search is None else self._search.consider(wanted)
        return Reply(body=refusal_body(answer) if isinstance(answer, Refusal) else accepted_body(answer))

    async def _serve_join(self, request: Request) -> Reply:
        wanted = _parse(request)
        answer = _NOT_LOOKING if self._search is None else await self._search.lead(wanted)
        return Reply(body=refusal_body(answer) if isinstance(answer, Refusal) else group_body(answer))

    def _check(self, me: Member) -> None:
        low, high = BANDWIDTHS_BPS
        if me.peer_id != self._caller.peer_id:
            raise ValueError(f"expected this peer, {self._caller.peer_id.short}, got {me.peer_id.short}")
        if self._is_client and me.role is not Role.CLIENT:
            raise ValueError(f"a peer in client mode is a {Role.CLIENT}, got {me.role}")
        if not 0 <= me.wanted_slot < self._grid.side:
            raise ValueError(f"slots go from 0 to {self._grid.side - 1}, got {me.wanted_slot}")
        lightest, heaviest = WEIGHTS
        if me.sends and not lightest <= me.weight <= heaviest:
            raise ValueError(f"the weight of a vector is from {lightest:g} to {heaviest:g}, got {me.weight}")
        if me.bandwidth is not None and not low <= me.bandwidth <= high:
            raise ValueError(f"a bandwidth is from {low:g} to {high:g} bytes a second, or None, got {me.bandwidth}")


def _parse(request: Request) -> JoinRequest:
    try:
        return parse_request_untrusted(request.body, request.peer_id)
    except RemoteProtocolError as error:
        raise CallRefused(str(error)) from error
