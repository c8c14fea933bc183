"""Averaging the copies of experts with the nodes that serve them too: the shell around `rounds` and `copies`.

At the beginning of a round a node reads who serves its experts, and asks each of them whether it takes part
(`replica.meet`). That leaves out those who have died, and those who serve an expert without replicating it. Then it
averages bundle by bundle (`net.averaging.reduction`). An average is used if it is whole: of all copies, at all numbers.
If a member is lost the others keep what they have, and do not wait for it again in this round; the next round is soon.

    replica.meet   {"period_s": float} -> {"period_s": float}     that of the one who answers
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import trio

from dmoe_jax.device import Device
from dmoe_jax.directory import find_replicas
from dmoe_jax.grid import parse_uid
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.replicas.config import ReplicaConfig
from dmoe_jax.replicas.copies import CopyLayout, Progress
from dmoe_jax.replicas.rounds import Bundle, bundles_of, group_of, next_round, unweighted, weighted
from net.averaging.reduction.all_reduce import AllReduce, AllReduceResult
from net.averaging.reduction.partition import AllReduceConfig
from net.dht.node import DhtNode
from net.errors import CallFailed, NetError
from net.identity import Contact, PeerId
from net.rpc.base import Caller, Reply, Request, read_request
from net.types import Array
from net.wire.fields import real

logger = logging.getLogger(__name__)

MEET = "replica.meet"
"""The method by which replicas find out who takes part in an average."""

_PREFIX = "replicas"
_PERIOD = real(0.0)


class ReplicaAverager:
    """Averages a node's experts with their other copies, round after round.

    Args:
      caller: places and serves the calls. dht: where the others are found.
      contact: this node.
      swarm: its name.
      backends: the experts by uid. progress: of each of them.
      device: copies and changes their state between two batches.
      config: when, and how long.

    Raises:
      ValueError: the caller averages replicas already.
    """

    def __init__(
        self,
        caller: Caller,
        dht: DhtNode,
        contact: Contact,
        *,
        swarm: str,
        backends: Mapping[str, ExpertBackend],
        progress: Mapping[str, Progress],
        device: Device,
        config: ReplicaConfig,
    ) -> None:
        self.averages = 0
        """Experts that have got an average, summed over rounds."""
        self.failed: Counter[str] = Counter()
        """Experts that should have got one and did not, by reason."""
        self._caller = caller
        self._dht = dht
        self._contact = contact
        self._swarm = swarm
        self._backends = backends
        self._progress = progress
        self._device = device
        self._config = config
        self._layouts: dict[str, CopyLayout] = {}
        timeout_s = config.average_timeout_s
        all_reduce = AllReduceConfig(sender_timeout_s=timeout_s / 3, timeout_s=timeout_s)
        self._all_reduce = AllReduce(caller, prefix=_PREFIX, config=all_reduce)

    def close(self) -> None:
        """Serve no more calls."""
        self._all_reduce.close()

    async def serve_meet(self, request: Request) -> Reply:
        """Answer `replica.meet`."""
        read_request(request, period_s=_PERIOD)
        return Reply(body={"period_s": self._config.average_period_s})

    async def run(self) -> None:
        """Average at each round's beginning, for ever. A round that takes longer than the period costs the next one."""
        while True:
            number, begins_at = next_round(self._dht.clock.now(), self._config.average_period_s)
            await trio.sleep(begins_at - self._dht.clock.now())
            try:
                await self.average(number)
            except NetError as error:
                self._note_failed(list(self._backends), f"network: {type(error).__name__}")

    async def average(self, round_number: int) -> None:
        """Carry out one round. If cancelled, some experts have their average and others have not."""
        uids = {parse_uid(uid): uid for uid in self._backends}
        found = await find_replicas(self._dht, list(uids))
        own = self._caller.peer_id
        peers = {uids[uid]: {each.contact.peer_id: each.contact for each in found[uid]} for uid in uids}
        # Experts that this node has not announced yet, nobody else expects of it.
        others = {
            uid: [contact for peer_id, contact in contacts.items() if peer_id != own]
            for uid, contacts in peers.items()
            if own in contacts
        }
        ready = await self._meet({contact for contacts in others.values() for contact in contacts})
        members = {}
        for uid, contacts in others.items():
            here = frozenset(contact for contact in contacts if contact in ready)
            if contacts and not here:
                self._note_failed([uid], "no other copy takes part")
            members[uid] = here | {self._contact}
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
            body, timeout_s = {"period_s": self._config.average_period_s}, self._config.meet_timeout_s
            try:
                reply = await self._caller.call(contact, MEET, body, timeout_s=timeout_s)
                period_s = _PERIOD.of_untrusted(reply.body, "period_s")
            except CallFailed as error:
                logger.info("node %s serves experts of ours and does not replicate them: %s", contact, error)
            except NetError as error:
                logger.info("node %s, which serves experts of ours, does not answer: %s", contact, error)
            else:
                if period_s == self._config.average_period_s:
                    ready.add(contact)
                    return
                logger.warning(
                    "node %s averages every %g s and this one every %g s: they do not meet",
                    contact,
                    period_s,
                    self._config.average_period_s,
                )

        async with trio.open_nursery() as nursery:
            for contact in contacts:
                nursery.start_soon(ask, contact)
        return ready

    async def _average_bundle(self, bundle: Bundle, round_number: int) -> set[PeerId]:
        """Average some experts; returns which members were lost."""
        layouts = [self._layout(uid) for uid in bundle.uids]
        counts, sent, vector = await self._device.run(self._snapshot, bundle.uids, layouts)
        group = group_of(
            bundle, swarm=self._swarm, round_number=round_number, schemas=[each.schema for each in layouts]
        )
        if not self._all_reduce.knows(group.group_id):
            result = await self._all_reduce.run(group, vector, size=vector.size)
            if result.complete:
                await self._take(bundle, layouts, counts, sent, result)
                return set()
            lost = {*result.lost_reducers, *result.lost_senders} - {self._caller.peer_id}
            self._note_failed(bundle.uids, "another copy was lost")
            return lost or {contact.peer_id for contact in bundle.members}
        self._note_failed(bundle.uids, "the clock went back")
        return set()

    def _snapshot(self, uids: Sequence[str], layouts: Sequence[CopyLayout]) -> tuple[list[int], list[Array], Array]:
        """(counts, what is sent of each expert, all of it weighted) of one moment: runs on the device's thread."""
        backends = [self._backends[uid] for uid in uids]
        counts = [backend.update_count for backend in backends]
        weights = [self._progress[uid].weight(count) for uid, count in zip(uids, counts, strict=True)]
        sent = [layout.vector(backend.state) for layout, backend in zip(layouts, backends, strict=True)]
        return counts, sent, weighted(sent, weights)

    async def _take(
        self,
        bundle: Bundle,
        layouts: Sequence[CopyLayout],
        counts: Sequence[int],
        sent: Sequence[Array],
        result: AllReduceResult,
    ) -> None:
        means = unweighted(result.average, [layout.size for layout in layouts])
        for uid, layout, count, own, mean in zip(bundle.uids, layouts, counts, sent, means, strict=True):
            if mean is None:
                self._note_failed([uid], "no copy is finite")
            elif not await self._device.run(add_average, self._backends[uid], layout, own, mean):
                self._note_failed([uid], "not finite")
            else:
                self._progress[uid].averaged(count)
                self.averages += 1

    def _layout(self, uid: str) -> CopyLayout:
        if uid not in self._layouts:
            self._layouts[uid] = CopyLayout(self._backends[uid].state)
        return self._layouts[uid]

    def _note_failed(self, uids: Sequence[str], reason: str) -> None:
        if uids:
            self.failed[reason] += len(uids)
            logger.info("%d experts were not averaged (%s), among them %s", len(uids), reason, uids[0])


def add_average(backend: ExpertBackend, layout: CopyLayout, sent: Array, average: Array) -> bool:
    """Put an average into an expert; run it on the device, between two batches.

    Args:
      sent: this copy's part in it, and `average`: both as of `CopyLayout`.

    Returns: whether the outcome is finite; if it is not, nothing was changed.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused
        state = layout.with_average(backend.state, sent, average)
    if state is None:
        return False
    backend.load(state, update_count=backend.update_count)
    return True
