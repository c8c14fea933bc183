"""Averaging the copies of experts with the nodes that serve them too: the shell around `rounds` and `copies`.

At the beginning of a round a node reads who serves its experts, and asks each of them whether it takes part
(`replica.meet`). That leaves out those who have died, and those who serve an expert without replicating it. Then it
averages bundle by bundle (`dmoe_net.averaging.reduction`). An average is used if it is whole: of all copies, at all
numbers. If a member is lost the others keep what they have, and do not wait for it again in this round; the next round
is soon.

    replica.meet   {"period_s": float} -> {"period_s": float}     that of the one who answers

While a bundle is averaged its members tell each other what their parts were learnt from (`dmoe_jax.placement.learnt`);
an average of which that is not known is not used.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import trio

from dmoe_jax.directory.directory import find_replicas
from dmoe_jax.directory.grid import parse_uid
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.placement.config import MEET_TIMEOUT_S
from dmoe_jax.placement.copies import CopyLayout, Progress
from dmoe_jax.placement.holder import Holder
from dmoe_jax.placement.learnt import LearntNames
from dmoe_jax.placement.rounds import Bundle, bundles_of, group_of, next_round, unweighted, weighted
from dmoe_net.averaging.reduction.all_reduce import AllReduce, AllReduceResult
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.errors import CallFailed, NetError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.nursery import for_each
from dmoe_net.rpc.base import Reply, Request, read_request
from dmoe_net.types import Array
from dmoe_net.wire.fields import real

logger = logging.getLogger(__name__)

MEET = "replica.meet"
"""The method by which replicas find out who takes part in an average."""

_PREFIX = "replicas"
_PERIOD = real(0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """Part of one expert in an average, all of one moment."""

    uid: str
    backend: ExpertBackend
    layout: CopyLayout
    count: int
    """Its updates."""
    sent: Array
    """Its numbers, as of `CopyLayout`."""
    learnt_from: tuple[bytes, ...]
    """The names of requests in it."""


class ReplicaAverager:
    """Averages a node's experts with their other copies, round after round.

    Args:
      progress: returns the progress of an expert by its uid.

    Raises:
      ValueError: the caller averages replicas already.
    """

    def __init__(self, holder: Holder, progress: Callable[[str], Progress]) -> None:
        self.averages = 0
        """Experts that have got an average, summed over rounds."""
        self.failed: Counter[str] = Counter()
        """Experts that should have got one and did not, by reason."""
        self._holder, self._progress, self._backends = holder, progress, holder.backends
        self._period_s, timeout_s = holder.config.average_period_s, holder.config.average_timeout_s
        self._layouts: dict[str, CopyLayout] = {}
        all_reduce = AllReduceConfig(sender_timeout_s=timeout_s / 3, timeout_s=timeout_s)
        self._all_reduce = AllReduce(holder.peer.rpc, prefix=_PREFIX, config=all_reduce)
        self.learnt = LearntNames(holder.peer.rpc, timeout_s=timeout_s)
        """Names of the requests learnt from, as the other replicas are told them."""

    def close(self) -> None:
        """Serve no more calls."""
        self._all_reduce.close()

    async def serve_meet(self, request: Request) -> Reply:
        """Answer `replica.meet`."""
        read_request(request, period_s=_PERIOD)
        return Reply(body={"period_s": self._period_s})

    async def run(self) -> None:
        """Average at each round's beginning, for ever. A round that takes longer than the period costs the next one."""
        while True:
            number, begins_at = next_round(self._holder.peer.dht.clock.now(), self._period_s)
            await trio.sleep(begins_at - self._holder.peer.dht.clock.now())
            try:
                await self.average(number)
            except NetError as error:
                self._note_failed(list(self._backends), f"network: {type(error).__name__}")

    async def average(self, round_number: int) -> None:
        """Carry out one round. If cancelled, some experts have their average and others have not."""
        uids = {parse_uid(uid): uid for uid in self._backends}
        found = await find_replicas(self._holder.peer.dht, list(uids))
        own = self._holder.contact
        peers = {uids[uid]: {each.contact.peer_id: each.contact for each in found[uid]} for uid in uids}
        # Experts that this node has not announced yet, nobody else expects of it.
        others = {
            uid: [contact for peer_id, contact in contacts.items() if peer_id != own.peer_id]
            for uid, contacts in peers.items()
            if own.peer_id in contacts
        }
        ready = await self._meet({contact for contacts in others.values() for contact in contacts})
        members = {}
        for uid, contacts in others.items():
            if uid not in self._backends:
                continue  # given up meanwhile
            here = frozenset(contact for contact in contacts if contact in ready)
            if contacts and not here:
                self._note_failed([uid], "no other copy takes part")
            members[uid] = here | {own}
        self.learnt.begin_round()
        lost: set[PeerId] = set()
        sizes = {uid: self._layout(uid).size for uid in members}
        for bundle in bundles_of(members, sizes):
            if lost & {contact.peer_id for contact in bundle.members}:
                self._note_failed(bundle.uids, "another copy was lost")
            else:
                lost |= await self._average_bundle(bundle, round_number)

    async def _meet(self, contacts: set[Contact]) -> set[Contact]:
        """Those who take part in averages, and as often as we do."""
        ready: set[Contact] = set()

        async def ask(contact: Contact) -> None:
            try:
                body = {"period_s": self._period_s}
                reply = await self._holder.peer.rpc.call(contact, MEET, body, timeout_s=MEET_TIMEOUT_S)
                period_s = _PERIOD.of_untrusted(reply.body, "period_s")
            except CallFailed as error:
                logger.info("node %s serves experts of ours and does not replicate them: %s", contact, error)
            except NetError as error:
                logger.info("node %s, which serves experts of ours, does not answer: %s", contact, error)
            else:
                if period_s == self._period_s:
                    ready.add(contact)
                    return
                text = "node %s averages every %g s and this one every %g s: they do not meet"
                logger.warning(text, contact, period_s, self._period_s)

        await for_each(ask, contacts)
        return ready

    async def _average_bundle(self, bundle: Bundle, round_number: int) -> set[PeerId]:
        """Average some experts; return the members that were lost."""
        backends = {uid: self._backends[uid] for uid in bundle.uids if uid in self._backends}
        if len(backends) < len(bundle.uids):
            self._note_failed(bundle.uids, "given up")
            return set()
        layouts = [self._layout(uid) for uid in bundle.uids]
        parts, vector = await self._holder.device.run(self._snapshot, list(backends.items()), layouts)
        schemas = [each.schema for each in layouts]
        group = group_of(bundle, swarm=self._holder.swarm, round_number=round_number, schemas=schemas)
        if group.group_id in self._all_reduce.groups:
            self._note_failed(bundle.uids, "the clock went back")
            return set()
        self.learnt.offer(group.group_id, [part.learnt_from for part in parts])
        own = self._holder.contact.peer_id
        names: list[list[bytes]] = []
        silent: set[PeerId] = set()

        async def ask() -> None:
            nonlocal names, silent
            others = [contact for contact in bundle.members if contact.peer_id != own]
            names, silent = await self.learnt.of_others(group.group_id, others, len(parts))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            result = await self._all_reduce.run(group, vector, size=vector.size)
            if not result.complete:
                nursery.cancel_scope.cancel()
        if result.complete and not silent:
            await self._take(parts, names, result)
            return set()
        lost = {*result.lost_reducers, *result.lost_senders} - {own}
        told = "another copy did not say what it has learnt from"
        self._note_failed(bundle.uids, told if result.complete else "another copy was lost")
        return lost | silent or {contact.peer_id for contact in bundle.members}

    def _snapshot(
        self, backends: Sequence[tuple[str, ExpertBackend]], layouts: Sequence[CopyLayout]
    ) -> tuple[list[_Part], Array]:
        """The parts of one moment, and all of them weighted in one vector: runs on the device's thread."""
        parts = [
            _Part(
                uid=uid,
                backend=backend,
                layout=layout,
                count=backend.update_count,
                sent=layout.vector(backend.state),
                learnt_from=tuple(backend.learnt_from),
            )
            for (uid, backend), layout in zip(backends, layouts, strict=True)
        ]
        weights = [self._progress(part.uid).weight(part.count) for part in parts]
        return parts, weighted([part.sent for part in parts], weights)

    async def _take(self, parts: Sequence[_Part], names: Sequence[Sequence[bytes]], result: AllReduceResult) -> None:
        means = unweighted(result.average, [part.layout.size for part in parts])
        for part, learnt_from, mean in zip(parts, names, means, strict=True):
            uid, backend, now = part.uid, part.backend, trio.current_time()
            if mean is None:
                self._note_failed([uid], "no copy is finite")
            elif self._backends.get(uid) is not backend:
                self._note_failed([uid], "given up")
            elif await self._holder.device.run(add_average, backend, part.layout, part.sent, mean, learnt_from, now):
                self._progress(uid).met(part.count)
                self.averages += 1
            else:
                self._note_failed([uid], "not finite")

    def _layout(self, uid: str) -> CopyLayout:
        if uid not in self._layouts:
            backend = self._backends[uid]
            self._layouts[uid] = CopyLayout(backend.state, meaning=backend.expert.meaning)
        return self._layouts[uid]

    def _note_failed(self, uids: Sequence[str], reason: str) -> None:
        if uids:
            self.failed[reason] += len(uids)
            logger.info("%d experts were not averaged (%s), among them %s", len(uids), reason, uids[0])


def add_average(
    backend: ExpertBackend,
    layout: CopyLayout,
    sent: Array,
    average: Array,
    learnt_from: Sequence[bytes] = (),
    now: float = 0.0,
) -> bool:
    """Put an average into an expert; run it on the device, between two batches.

    Args:
      sent: this copy's part in it, and `average`: both as of `CopyLayout`.
      learnt_from: requests in the other parts. now: trio's clock.

    Returns: whether the outcome is finite; if it is not, nothing was changed.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused
        state = layout.with_average(backend.state, sent, average)
    if state is None:
        return False
    backend.learnt_elsewhere(learnt_from, now)  # first: what the event loop finds there it refuses
    backend.load(state, update_count=backend.update_count)
    return True
