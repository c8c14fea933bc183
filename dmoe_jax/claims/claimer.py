"""The shell of a claimer: reads, probes, writes claims, and has its node take experts up or give them up.

RPC method (body -> body):
  claims.keep   {uids} -> {kept}   "I am about to give these up to you: which of them do you keep?"

A node gives an expert up only if the other has promised to keep it. Counts of updates move while two nodes compare
them; without the promise both might give up, each to the other.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import trio

from dmoe_jax.claims.claiming import Actions, ClaimConfig, Claiming, Listing, Stage
from dmoe_jax.claims.contest import Standing, gives_up, standing_untrusted
from dmoe_jax.claims.records import check_claimable, claim_item, withdrawal_item
from dmoe_jax.claims.survey import Survey
from dmoe_jax.claims.watch import Watch
from dmoe_jax.directory.grid import ExpertUid
from dmoe_net.dht.node import DhtNode
from dmoe_net.errors import NetError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.rpc.base import Caller, Reply, Request, handlers, read_request
from dmoe_net.wire.fields import several, text

logger = logging.getLogger(__name__)

KEEP = "claims.keep"
MAX_UIDS = 64
"""Most experts of one `claims.keep`; of further ones a node speaks in its next round."""

_UIDS = several(text(1, 256), MAX_UIDS)
_CALL_TIMEOUT_S = 2.0
_CHUNK = 8
"""Experts that are announced together: not one by one, and not only when the last of a thousand is restored."""


class CannotTakeUp(Exception):
    """An expert cannot be taken up here; the message says why."""


@runtime_checkable
class Host(Protocol):
    """What a claimer needs of its node."""

    @property
    def served(self) -> Collection[str]:
        """The experts that it serves, those that it is giving up too."""
        ...

    @property
    def is_warm(self) -> bool:
        """Whether it can serve at once."""
        ...

    def updates(self, uid: str) -> int:
        """Optimiser steps that an expert has taken."""
        ...

    async def take_up(self, uid: str) -> str:
        """Make an expert, fill it with what it is to begin with, and answer calls for it; says what that was.

        Raises:
          CannotTakeUp: the reason.
        """
        ...

    async def introduce(self) -> None:
        """List the node in the swarm, as one that claims, whether it serves yet or not."""
        ...

    async def announce(self, uids: Collection[str]) -> None:
        """Return when these experts are announced; when the node is warm, that is."""
        ...

    async def give_up(self, uid: str, to: Contact) -> None:
        """Refuse new calls for an expert, hand its announcement over, answer what was accepted, and forget it."""
        ...

    def outlast(self, uid: str, expiration: float) -> None:
        """Announce an expert for longer than this, so that the announcement replaces another node's."""
        ...


class Claimer:
    """Claims experts for a node.

    Args:
      caller, dht, swarm: the node's.
      uids: the experts that it may claim, by their names.
      config: settings.
      host: the node.
      on_progress: told what it took up and gave up, in a few words.

    Raises:
      ValueError: the peer does not listen, or there are too many experts, or none.
    """

    def __init__(
        self,
        caller: Caller,
        dht: DhtNode,
        swarm: str,
        uids: Mapping[str, ExpertUid],
        config: ClaimConfig,
        host: Host,
        *,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        if caller.address is None:
            raise ValueError("a node that claims experts must listen: its peer is in client mode")
        check_claimable(uids)
        self.settled = trio.Event()
        """Set when there is nothing more to claim for now."""
        self._caller, self._dht, self._uids, self._config, self._host = caller, dht, uids, config, host
        self._contact = Contact(caller.peer_id, caller.address)
        self._on_progress = on_progress
        self._core = Claiming(caller.peer_id, uids.keys(), config)
        self._survey = Survey(dht, swarm, uids)
        self._watch = Watch(caller, config, nodes=self._survey.nodes, on_change=self._wake)
        self._news = trio.Event()
        self._scanned_at = float("-inf")
        self._won: list[str] = []
        self._has_won = trio.Event()
        self._written: dict[str, float] = {}  # uid -> expiration of our claim, of those that still live
        self._yielding: set[str] = set()  # we ask another node to keep these
        self._leaving: set[str] = set()  # it has promised to: we give them up
        self._meeting: set[PeerId] = set()
        self._scope: trio.CancelScope | None = None

    def status(self) -> dict[str, Any]:
        """For `node.status`, plain CBOR data: `room`, how many experts it may still claim; their `scope`, see
        `scope_of`; claims `held`, `won`, `lost` and `failed`; experts `given_up`; `adopted` by origin; and `fixed`,
        those that it serves without a claim."""
        totals = self._core.totals
        return {
            "room": self.room,
            "scope": self._survey.scope,
            "held": len(self._core.held),
            "won": totals.won,
            "lost": totals.lost,
            "failed": totals.failed,
            "given_up": totals.given_up,
            "adopted": dict(totals.adopted),
            "fixed": [uid for uid in self._host.served if uid not in self._uids],
        }

    @property
    def room(self) -> int:
        """How many further experts the node may claim."""
        return self._core.room(self._host.served)

    async def run(self) -> None:
        """Claim for ever. When it ends, all claims that still live are taken back within two seconds."""
        with handlers(self._caller, {KEEP: self._keep}):
            try:
                async with trio.open_nursery() as nursery:
                    self._scope = nursery.cancel_scope
                    await self._host.introduce()
                    await trio.sleep(self._config.gather_s)
                    nursery.start_soon(self._watch.run)
                    nursery.start_soon(self._renew)
                    nursery.start_soon(self._take_up)
                    while True:
                        await self._round(nursery)
                        await self._pause()
            finally:
                with trio.move_on_after(2.0, shield=True):
                    await self._withdraw(list(self._written))

    def stop(self) -> None:
        """Have `run` end: from now on nothing is taken up or given up."""
        if self._scope is not None:
            self._scope.cancel()

    def _wake(self) -> None:
        self._news.set()

    async def _pause(self) -> None:
        """Until the next scan, or a claim has settled, or there is news."""
        now = self._dht.clock.now()
        next_s = min(self._scanned_at + self._config.scan_period_s, self._core.settles_at()) - now
        with trio.move_on_after(max(next_s, 0.0)):
            await self._news.wait()
        self._news = trio.Event()

    async def _round(self, nursery: trio.Nursery) -> None:
        read_at = self._dht.clock.now()
        if read_at >= self._scanned_at + self._config.scan_period_s:
            self._scanned_at = read_at
            await self._survey.scan()
        elif self._core.settles_at() <= read_at:
            await self._survey.look(self._core.held)
        view = self._survey.view(self._caller.peer_id, self._watch.dead, read_at=read_at)
        host = self._host
        actions = self._core.step(view, host.served, is_warm=host.is_warm, now=self._dht.clock.now())
        for uid, why in actions.drop.items():
            logger.info("claim for expert %s is lost: %s", uid, why)
        await self._withdraw(actions.drop)
        self._to_take_up(actions.take_up)
        # Confirmations first: they must be there before others read.
        await self._write(actions.confirm, is_confirmed=True)
        await self._write(actions.claim, is_confirmed=False)
        self._meet(actions, nursery)
        if not self._core.held:
            self.settled.set()

    async def _write(self, uids: Collection[str], *, is_confirmed: bool) -> None:
        if uids:
            stands = await self._store(uids, is_confirmed=is_confirmed)
            self._to_take_up(self._core.wrote(stands, self._dht.clock.now()))

    async def _store(self, uids: Collection[str], *, is_confirmed: bool) -> dict[str, bool]:
        expiration = self._dht.clock.now() + self._config.lifetime_s
        now = self._dht.clock.now()
        self._written = {uid: end for uid, end in self._written.items() if end > now} | dict.fromkeys(uids, expiration)
        items = [
            claim_item(self._uids[uid], self._contact, is_confirmed=is_confirmed, expiration=expiration) for uid in uids
        ]
        return dict(zip(uids, await self._dht.store_many(items), strict=True))

    async def _withdraw(self, uids: Iterable[str]) -> None:
        now = self._dht.clock.now()
        items = []
        for uid in uids:
            if (expiration := self._written.pop(uid, 0.0)) > now:
                # A little later than the claim, or it would not replace it.
                items.append(withdrawal_item(self._uids[uid], self._contact, expiration=expiration + 1e-3))
        if items:
            await self._dht.store_many(items)

    async def _renew(self) -> None:
        """Keep the claims alive that are won and whose experts are not served yet."""
        while True:
            await trio.sleep(self._config.lifetime_s / 3)
            if won := [uid for uid, stage in self._core.held.items() if stage is Stage.WON]:
                await self._store(won, is_confirmed=True)

    def _to_take_up(self, uids: Collection[str]) -> None:
        if uids:
            self._won += uids
            self._has_won.set()

    async def _take_up(self) -> None:
        """Take up what is won, some at a time, one after the other: the memory of one expert at a time."""
        while True:
            await self._has_won.wait()
            chunk, self._won = self._won[:_CHUNK], self._won[_CHUNK:]
            if not self._won:
                self._has_won = trio.Event()
            origins: dict[str, str] = {}
            for uid in chunk:
                try:
                    origins[uid] = await self._host.take_up(uid)
                except CannotTakeUp as error:
                    logger.warning("expert %s cannot be taken up here: %s", uid, error)
                    self._on_progress(f"cannot take up {uid}: {error}")
                    self._core.failed(uid, self._dht.clock.now())
                    await self._withdraw([uid])
                else:
                    logger.info("expert %s is taken up, from its %s", uid, origins[uid])
            if origins:
                self._on_progress(f"took up {_counted(origins)}")
                await self._host.announce(origins)
            for uid, origin in origins.items():
                # The claim is not taken back: it keeps others away until they have seen the announcement.
                self._core.served(uid, origin)
            self._wake()

    def _meet(self, actions: Actions, nursery: trio.Nursery) -> None:
        """Ask the nodes that announce experts of ours; each in a task of its own, one at a time."""
        rivals: dict[Contact, dict[str, Listing]] = {}
        for uid, listing in actions.contest.items():
            if uid not in self._leaving and listing.contact.peer_id not in self._meeting:
                of_rival = rivals.setdefault(listing.contact, {})
                if len(of_rival) < MAX_UIDS:
                    of_rival[uid] = listing
        for contact, listings in rivals.items():
            self._meeting.add(contact.peer_id)
            nursery.start_soon(self._contest, contact, listings)

    async def _contest(self, rival: Contact, listings: Mapping[str, Listing]) -> None:
        try:
            reply = await self._caller.call(rival, "node.status", {}, timeout_s=_CALL_TIMEOUT_S)
            losing: dict[str, Standing] = {}
            for uid, listing in listings.items():
                other = standing_untrusted(reply.body, uid, rival.peer_id)
                if other is not None and uid in self._host.served and gives_up(self._standing(uid), other):
                    losing[uid] = other
                else:
                    self._host.outlast(uid, listing.expiration)
            if losing:
                await self._give_up(rival, losing)
        except NetError as error:
            logger.info("node %s announces experts of ours and does not say more: %s", rival, error)
        finally:
            self._meeting.discard(rival.peer_id)

    def _standing(self, uid: str) -> Standing:
        return Standing(peer_id=self._caller.peer_id, updates=self._host.updates(uid))

    async def _give_up(self, rival: Contact, losing: Mapping[str, Standing]) -> None:
        kept = {uid for uid, other in losing.items() if other.is_fixed}  # whoever was told to serve it keeps it
        if asked := losing.keys() - kept - self._yielding:
            kept |= await self._kept_by(rival, asked)
        kept -= self._leaving
        self._leaving |= kept
        try:
            for uid in sorted(kept):
                text = f"gives up expert {uid} to {rival.peer_id.short}, which serves it too"
                text += f" ({losing[uid].updates} updates there, {self._host.updates(uid)} here)"
                logger.warning("this node %s", text)
                self._on_progress(text)
                await self._host.give_up(uid, rival)
                self._core.totals.given_up += 1
        finally:
            self._leaving -= kept

    async def _kept_by(self, rival: Contact, uids: Collection[str]) -> set[str]:
        """Which of these experts another node promises to keep, and we have not meanwhile promised to it to keep."""
        self._yielding.update(uids)
        try:
            reply = await self._caller.call(rival, KEEP, {"uids": sorted(uids)}, timeout_s=_CALL_TIMEOUT_S)
            return set(_UIDS.of_untrusted(reply.body, "kept")).intersection(uids, self._yielding)
        finally:
            self._yielding.difference_update(uids)

    async def _keep(self, request: Request) -> Reply:
        """Promise to keep experts that another node is about to give up to us.

        Where both are about to, the one with the larger id keeps them.
        """
        (uids,) = read_request(request, uids=_UIDS)
        kept = []
        for uid in uids:
            if uid not in self._uids or uid not in self._host.served or uid in self._leaving:
                continue
            if uid in self._yielding and self._caller.peer_id < request.peer_id:
                continue
            self._yielding.discard(uid)
            kept.append(uid)
        return Reply(body={"kept": kept})


def _counted(origins: Mapping[str, str]) -> str:
    names = list(origins.values())
    counts = [f"{names.count(origin)} from {origin}" for origin in dict.fromkeys(names)]
    first, *others = origins
    return f"{first} and {len(others)} others ({', '.join(counts)})" if others else f"{first} (from its {names[0]})"
