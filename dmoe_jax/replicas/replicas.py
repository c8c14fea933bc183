"""All that makes a node's experts replicas: their slots, their averages, and their states for newcomers."""

import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from dmoe_jax.directory.directory import find_replicas
from dmoe_jax.directory.grid import ExpertUid, parse_uid
from dmoe_jax.machine.device import Device
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.replicas.config import ReplicaConfig
from dmoe_jax.replicas.copies import Progress
from dmoe_jax.replicas.learnt import LEARNT
from dmoe_jax.replicas.listing import SlotListing
from dmoe_jax.replicas.replica_averager import MEET, ReplicaAverager
from dmoe_jax.replicas.state import STATE, StateShelf, fetch_state
from dmoe_net.dht.node import DhtNode
from dmoe_net.dht.records import Value
from dmoe_net.identity import Contact
from dmoe_net.nursery import background_nursery
from dmoe_net.rpc.base import Caller, handlers

logger = logging.getLogger(__name__)

_TIDY_S = 30.0
_MAX_FETCHES = 4
"""States that are fetched at once."""


class Replicas:
    """A node's experts as replicas of those that others serve. Made by `replicating`; it is the node's
    `dmoe_jax.node.server.ExpertListing`."""

    def __init__(
        self,
        caller: Caller,
        dht: DhtNode,
        backends: Mapping[str, ExpertBackend],
        *,
        contact: Contact,
        swarm: str,
        device: Device,
        rng: random.Random,
        config: ReplicaConfig,
    ) -> None:
        self.taken: dict[str, int] = {}
        """Experts that began with the state of another copy, and the updates of that state."""
        self.not_taken: Counter[str] = Counter()
        """Why a state could not be had, by reason; as often as a node did not give one."""
        self._caller = caller
        self._dht = dht
        self._swarm = swarm
        self._device = device
        self._rng = rng
        self._config = config
        self._backends = dict(backends)
        self._progress = {uid: Progress() for uid in backends}
        self.listing = SlotListing(dht, contact, settle_s=config.settle_s)
        """Its slots."""
        self.averager = ReplicaAverager(
            caller,
            dht,
            contact,
            swarm=swarm,
            backends=self._backends,
            progress=self._progress,
            device=device,
            config=config,
        )
        """Its averages."""
        self.shelf = StateShelf(
            caller,
            dht,
            swarm=swarm,
            backends=self._backends,
            device=device,
            on_given=lambda uid, count: self._progress[uid].gave(count),
        )
        """Its states, for others."""

    async def fetch_state(self, uid: str, backend: ExpertBackend) -> int | None:
        """Give an expert the state of another node that serves it; see `dmoe_jax.replicas.state.fetch_state`.

        Returns: the updates of that state; None if nobody else serves the expert, or its state cannot be had.
        """
        taken = await fetch_state(
            uid,
            backend,
            caller=self._caller,
            dht=self._dht,
            swarm=self._swarm,
            device=self._device,
            rng=self._rng,
            timeout_s=self._config.fetch_timeout_s,
            failed=self.not_taken,
        )
        if taken is not None:
            self.taken[uid] = taken
            self._progress[uid].took(taken)
        return taken

    async def fetch_states(self, on_progress: Callable[[str], None]) -> None:
        """Give each expert that others serve the state that it has there, before this node answers for it."""
        uids = [parse_uid(uid) for uid in self._backends]
        found = await find_replicas(self._dht, uids)
        served = [str(uid) for uid in uids if any(self._is_other(each.contact) for each in found[uid])]
        limit = trio.CapacityLimiter(_MAX_FETCHES)

        async def fetch(uid: str) -> None:
            async with limit:
                if await self.fetch_state(uid, self._backends[uid]) is None:
                    self._progress[uid].missed()

        async with trio.open_nursery() as nursery:
            for uid in served:
                nursery.start_soon(fetch, uid)
        if served:
            on_progress(f"{len(self.taken)} of {len(served)} experts begin as copies of those that others serve")
        if missing := [uid for uid in served if uid not in self.taken]:
            logger.warning(
                "%d experts are served by others whose state could not be had (%s), among them %s",
                len(missing),
                ", ".join(self.not_taken) or "they are gone",
                missing[0],
            )

    def _is_other(self, contact: Contact) -> bool:
        return contact.peer_id != self._caller.peer_id

    async def announce(self, uids: Sequence[ExpertUid], *, expiration: float) -> Mapping[ExpertUid, bool]:
        """Announce experts in slots of this node's own; see `SlotListing.announce`."""
        return await self.listing.announce(uids, expiration=expiration)

    async def withdraw(self, uids: Sequence[ExpertUid]) -> None:
        """Take the announcements back."""
        await self.listing.withdraw(uids)

    def status(self) -> dict[str, Any]:
        """Under "replicas": the `slots` by uid and their `summary`, `slots_lost` to others, `averages` made (experts,
        summed over rounds), averages `failed` by reason, states `taken` from others and `given` to them, and those
        `not_taken` by reason."""
        return {
            "replicas": {
                "slots": {str(uid): slot for uid, slot in self.listing.claims.held.items()},
                "summary": self.listing.summary,
                "slots_lost": self.listing.claims.lost,
                "averages": self.averager.averages,
                "failed": dict(self.averager.failed),
                "taken": len(self.taken),
                "given": self.shelf.given,
                "not_taken": dict(self.not_taken),
            }
        }

    def facts(self) -> dict[str, Value]:
        """How many experts it has in which slot, averages that were made, and that failed."""
        averager = self.averager
        return {
            "slots": self.listing.summary,
            "averages": averager.averages,
            "averages_failed": averager.failed.total(),
        }

    async def run(self) -> None:
        """Average with others, and put away states that nobody fetches, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.averager.run)
            while True:
                await trio.sleep(_TIDY_S)
                self.shelf.close_idle()


@asynccontextmanager
async def replicating(
    caller: Caller,
    dht: DhtNode,
    backends: Mapping[str, ExpertBackend],
    *,
    swarm: str,
    device: Device,
    rng: random.Random,
    config: ReplicaConfig | None,
    on_progress: Callable[[str], None],
) -> AsyncIterator[Replicas | None]:
    """As long as the block lasts, experts are replicas of those that others serve, with their states to begin with;
    with None as `config` they are not, and nothing is yielded.

    Averages run, and states are given to newcomers. The block is to announce the experts, by what it is given.

    Args:
      caller: places and serves the calls. dht: where the others are found.
      backends: the experts by uid.
      swarm: its name.
      device: runs what changes them, between two batches.
      rng: draws what has to be drawn.
      on_progress: told how many states were taken from others.

    Raises:
      ValueError: this peer listens nowhere, or serves replicas already.
    """
    if config is None:
        yield None
        return
    if caller.address is None:
        raise ValueError("a node that replicates experts must listen: its peer is in client mode")
    contact = Contact(caller.peer_id, caller.address)
    replicas = Replicas(caller, dht, backends, contact=contact, swarm=swarm, device=device, rng=rng, config=config)
    try:
        averager = replicas.averager
        methods = {MEET: averager.serve_meet, LEARNT: averager.learnt.serve, STATE: replicas.shelf.serve}
        with handlers(caller, methods):
            async with background_nursery() as nursery:
                await replicas.fetch_states(on_progress)
                nursery.start_soon(replicas.run)
                yield replicas
    finally:
        replicas.shelf.close()
        replicas.averager.close()
