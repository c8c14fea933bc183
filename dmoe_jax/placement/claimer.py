"""The shell of a claimer: reads, probes, writes claims, and has its node take experts up or give them up.

RPC method (body -> body):
  placement.keep   {uids} -> {kept}   "I am about to give these up to you: which of them do you keep?"

A node gives an expert up only if as many others as are wanted have promised to keep it, and have answered a call for
it. Counts of updates move while nodes compare them; without the promise all might give up, each to another.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import trio

from dmoe_jax.directory.grid import ExpertUid
from dmoe_jax.directory.members import ask_nodes
from dmoe_jax.placement.claiming import Actions, Claiming, Stage
from dmoe_jax.placement.contest import Standing, gives_up_to, standing_untrusted
from dmoe_jax.placement.holder import Holder
from dmoe_jax.placement.host import CannotTakeUp, ClaimingNode
from dmoe_jax.placement.proof import computes
from dmoe_jax.placement.survey import Claims, Survey
from dmoe_jax.placement.watch import Watch
from dmoe_net.errors import NetError, RemoteProtocolError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.nursery import for_each
from dmoe_net.rpc.base import Reply, Request, handlers, read_request
from dmoe_net.wire.fields import several, text

logger = logging.getLogger(__name__)

KEEP = "placement.keep"
MAX_UIDS = 64
"""Most experts of one `placement.keep`; of further ones a node speaks in its next round."""

_UIDS = several(text(1, 256), MAX_UIDS)
_CALL_TIMEOUT_S = 2.0
_CHUNK, _CHUNK_S = 8, 2.0
"""Most experts that are announced together, and seconds after which those that are there are announced."""


class Claimer:
    """Claims experts for a node.

    Args:
      uids: the experts that it may claim, by their names; see `check_claimable`.
      on_progress: told what it took up and gave up, in a few words.
    """

    def __init__(
        self,
        holder: Holder,
        uids: Mapping[str, ExpertUid],
        host: ClaimingNode,
        *,
        on_progress: Callable[[str], None],
    ) -> None:
        caller, dht, config = holder.peer.rpc, holder.peer.dht, holder.config
        self.settled = trio.Event()
        """Set when there is nothing more to claim for now."""
        self.scope = trio.CancelScope()
        """Ends `run` if cancelled: from then on nothing is taken up or given up."""
        self._caller, self._config = caller, config
        self._uids, self._host, self._on_progress = uids, host, on_progress
        self._now = dht.clock.ticks  # unlike `now` it is never set: claims settle by it
        self._core = Claiming(caller.peer_id, uids.keys(), config)
        self._survey = survey = Survey(dht, holder.swarm, uids)
        self._watch = Watch(caller, config, nodes=survey.nodes, claimers=survey.claimers, on_change=self._wake)
        self._news = trio.Event()
        self._scanned_at = float("-inf")
        self._holders: Mapping[str, Mapping[PeerId, Contact]] = {}  # as of the last look
        self._won: list[str] = []
        self._has_won = trio.Event()
        self._claims = Claims(dht, uids, life_s=config.claim_life_s)
        self._yielding: set[str] = set()  # we ask another node to keep these
        self._leaving: set[str] = set()  # it has promised to: we give them up
        self._contested: set[str] = set()  # about these we are asking others now

    def status(self) -> dict[str, Any]:
        """For `node.status`, plain CBOR data: `room`, how many experts it may still claim; their `scope`, see
        `Survey`; claims `held`, `won`, `lost` and `failed`; experts `given_up`; `adopted` by origin; and `fixed`,
        those that it serves without a claim."""
        return {
            "room": self._core.room(self._host.backends),
            "scope": self._survey.scope,
            "held": len(self._core.held),
            **asdict(self._core.totals),
            "fixed": [uid for uid in self._host.backends if uid not in self._uids],
        }

    async def run(self) -> None:
        """Claim for ever. When it ends, all claims that still live are taken back within two seconds."""
        with handlers(self._caller, {KEEP: self._keep}), self.scope:
            try:
                async with trio.open_nursery() as nursery:
                    await self._host.node.introduce()
                    await trio.sleep(self._config.gather_s)
                    nursery.start_soon(self._watch.run)
                    nursery.start_soon(self._renew)
                    nursery.start_soon(self._take_up)
                    while True:
                        await self._round(nursery)
                        await self._pause()
            finally:
                with trio.move_on_after(2.0, shield=True):
                    await self._claims.withdraw_all()

    def _wake(self) -> None:
        self._news.set()

    async def _pause(self) -> None:
        """Until the next scan, or a claim has settled, or there is news."""
        next_s = min(self._scanned_at + self._config.scan_period_s, self._core.settles_at()) - self._now()
        with trio.move_on_after(max(next_s, 0.0)):
            await self._news.wait()
        self._news = trio.Event()

    async def _round(self, nursery: trio.Nursery) -> None:
        read_at = self._now()
        if read_at >= self._scanned_at + self._config.scan_period_s:
            self._scanned_at = read_at
            await self._survey.scan()
        elif self._core.settles_at() <= read_at:
            await self._survey.look(self._core.held)
        view = self._survey.view(self._caller.peer_id, self._watch.dead, read_at=read_at)
        self._holders = view.holders
        host = self._host
        actions = self._core.step(view, host.backends, is_warm=host.node.warm.is_set(), now=self._now())
        for uid, why in actions.drop.items():
            logger.info("claim for expert %s is lost: %s", uid, why)
        self._to_take_up(actions.take_up)
        if actions.claim or actions.confirm or actions.drop:
            stands = await self._claims.write(actions.claim, confirmed=actions.confirm, gone=actions.drop)
            self._to_take_up(self._core.wrote(stands, self._now()))
        self._meet(actions, nursery)
        if not self._core.held:
            self.settled.set()

    async def _renew(self) -> None:
        """Keep the claims alive that are won and whose experts are not served yet."""
        while True:
            await trio.sleep(self._config.claim_life_s / 3)
            if won := [uid for uid, stage in self._core.held.items() if stage is Stage.WON]:
                await self._claims.write(confirmed=won)

    def _to_take_up(self, uids: Collection[str]) -> None:
        if uids:
            self._won += uids
            self._has_won.set()

    async def _take_up(self) -> None:
        """Take up what is won, some at a time, one after the other: the memory of one expert at a time. Experts that
        nobody serves come first."""
        while True:
            await self._has_won.wait()
            began, origins = self._now(), dict[str, str]()
            while self._won and len(origins) < _CHUNK and self._now() < began + _CHUNK_S:
                uid = min(self._won, key=lambda uid: len(self._holders.get(uid, {}).keys() - self._watch.dead))
                self._won.remove(uid)
                try:
                    origins[uid] = await self._host.take_up(uid)
                except CannotTakeUp as error:
                    logger.warning("expert %s cannot be taken up here: %s", uid, error)
                    self._on_progress(f"cannot take up {uid}: {error}")
                    self._core.failed(uid, self._now())
                    await self._claims.write(gone=[uid])
                else:
                    logger.info("expert %s is taken up, from its %s", uid, origins[uid])
            if not self._won:
                self._has_won = trio.Event()
            if origins:
                self._on_progress(f"took up {_counted(origins)}")
                await self._host.announce(origins)
            for uid, origin in origins.items():
                # The claim is not taken back: it keeps others away until they have seen the announcement.
                self._core.served(uid, origin)
            self._wake()

    def _meet(self, actions: Actions, nursery: trio.Nursery) -> None:
        """Ask the other holders of experts that too many nodes hold, some experts at a time."""
        asked = [each for each in actions.contest.items() if each[0] not in self._contested]
        if some := dict(asked[:MAX_UIDS]):
            self._contested.update(some)
            nursery.start_soon(self._contest, some)

    async def _contest(self, contested: Mapping[str, Sequence[Contact]]) -> None:
        try:
            contacts = dict.fromkeys(contact for others in contested.values() for contact in others)
            statuses = await ask_nodes(self._caller, contacts)
            keepers = {uid: to for uid, others in contested.items() if (to := self._keepers(uid, others, statuses))}
            if keepers:
                await self._give_up(keepers, {contact.peer_id: contact for contact in contacts})
        finally:
            self._contested.difference_update(contested)

    def _keepers(
        self, uid: str, others: Iterable[Contact], statuses: Mapping[PeerId, Mapping[str, Any]]
    ) -> list[Standing]:
        """The holders that have to keep an expert so that this node gives it up; none: it keeps it."""
        if uid not in self._host.backends:
            return []
        standings = [each for contact in others if (each := _standing(statuses.get(contact.peer_id), uid, contact))]
        own = Standing(peer_id=self._caller.peer_id, updates=self._host.backends[uid].update_count)
        return gives_up_to(own, standings, self._config.replicas)

    async def _give_up(self, keepers: Mapping[str, Sequence[Standing]], contacts: Mapping[PeerId, Contact]) -> None:
        """Give experts up, each if all its keepers keep it."""
        asked: dict[PeerId, set[str]] = {}
        for uid, standings in keepers.items():
            for standing in standings:
                if not standing.is_fixed:  # a node that was told to serve an expert need not promise
                    asked.setdefault(standing.peer_id, set()).add(uid)
        promised = await self._promised({contacts[peer_id]: uids for peer_id, uids in asked.items()})
        kept = {
            uid
            for uid, standings in keepers.items()
            if all(each.is_fixed or uid in promised.get(each.peer_id, ()) for each in standings)
        }
        kept -= await self._unanswered({uid: [contacts[each.peer_id] for each in keepers[uid]] for uid in kept})
        self._leaving |= kept
        try:
            for uid in sorted(kept):
                names = " and ".join(each.peer_id.short for each in keepers[uid])
                text = f"gives up expert {uid} to {names}, who {'serves' if len(keepers[uid]) == 1 else 'serve'} it too"
                logger.info("this node %s", text)
                self._on_progress(text)
                self._core.gave_up(uid, self._now())
                await self._host.give_up(uid)
        finally:
            self._leaving -= kept

    async def _unanswered(self, keepers: Mapping[str, Sequence[Contact]]) -> set[str]:
        """The experts that some of their keepers do not compute: whoever only says that it serves keeps nothing."""
        found: set[str] = set()

        async def ask(uid: str, contact: Contact) -> None:
            backend = self._host.backends.get(uid)
            if backend is not None and not await computes(self._caller, contact, uid, backend.expert):
                logger.warning("node %s says that it serves %s, and does not compute it", contact, uid)
                found.add(uid)

        async with trio.open_nursery() as nursery:
            for uid, contacts in keepers.items():
                for contact in contacts:
                    nursery.start_soon(ask, uid, contact)
        return found

    async def _promised(self, asked: Mapping[Contact, Collection[str]]) -> dict[PeerId, set[str]]:
        """Experts that each other node promises to keep, and that we have not meanwhile promised to keep ourselves."""
        about = {uid for uids in asked.values() for uid in uids}
        promised: dict[PeerId, set[str]] = {}
        self._yielding.update(about)

        async def ask(contact: Contact, uids: Collection[str]) -> None:
            try:
                reply = await self._caller.call(contact, KEEP, {"uids": sorted(uids)}, timeout_s=_CALL_TIMEOUT_S)
                promised[contact.peer_id] = set(_UIDS.of_untrusted(reply.body, "kept")).intersection(uids)
            except NetError as error:
                logger.info("node %s does not promise to keep experts: %s", contact, error)

        try:
            await for_each(ask, asked.keys(), asked.values())
            return {peer_id: uids & self._yielding for peer_id, uids in promised.items()}
        finally:
            self._yielding.difference_update(about)

    async def _keep(self, request: Request) -> Reply:
        """Promise to keep experts that another node is about to give up to us.

        Where both are about to, the one with the larger id keeps them.
        """
        (uids,) = read_request(request, uids=_UIDS)
        kept = []
        for uid in uids:
            if uid not in self._uids or uid not in self._host.backends or uid in self._leaving:
                continue
            if uid in self._yielding and self._caller.peer_id < request.peer_id:
                continue
            self._yielding.discard(uid)
            kept.append(uid)
        return Reply(body={"kept": kept})


def _standing(status: Mapping[str, Any] | None, uid: str, contact: Contact) -> Standing | None:
    """Standing of another holder; None if it does not answer, or says nothing of the expert that could be read."""
    try:
        return None if status is None else standing_untrusted(status, uid, contact.peer_id)
    except RemoteProtocolError as error:
        logger.info("node %s does not say how far expert %s is: %s", contact, uid, error)
        return None


def _counted(origins: Mapping[str, str]) -> str:
    names = list(origins.values())
    counts = [f"{names.count(origin)} from {origin}" for origin in dict.fromkeys(names)]
    first, *others = origins
    return f"{first} and {len(others)} others ({', '.join(counts)})" if others else f"{first} (from its {names[0]})"
