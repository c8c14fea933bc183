"""A node's experts beside the same ones at other nodes: their averages, and their states for newcomers."""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from dmoe_jax.directory.directory import find_replicas
from dmoe_jax.directory.grid import parse_uid
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.placement.averager import MEET, ReplicaAverager
from dmoe_jax.placement.copies import Progress
from dmoe_jax.placement.holder import Holder
from dmoe_jax.placement.learnt import LEARNT
from dmoe_jax.placement.state import STATE, HoldersSilent, StateShelf, fetch_state
from dmoe_net.averaging.state.download import StateUnavailable
from dmoe_net.dht.entries import Value
from dmoe_net.nursery import background_nursery, for_each
from dmoe_net.rpc.base import handlers

logger = logging.getLogger(__name__)

_TIDY_S = 30.0
_MAX_FETCHES = 4
"""States that are fetched at once."""


class Replicas:
    """A node's experts as replicas of those that others serve. Made by `replicating`."""

    def __init__(self, holder: Holder) -> None:
        self.taken: dict[str, int] = {}
        """Experts that began with the state of another copy, and the updates of that state."""
        self.not_taken: Counter[str] = Counter()
        """States that could not be had from those who serve the expert, by reason."""
        self._holder = holder
        self._progress: dict[str, Progress] = {}
        self.averager = ReplicaAverager(holder, self.progress)
        self.shelf = StateShelf(holder, on_given=lambda uid, count: self.progress(uid).gave(count))

    def progress(self, uid: str) -> Progress:
        """Progress of an expert since its last average."""
        return self._progress.setdefault(uid, Progress())

    def forget(self, uid: str) -> None:
        """Forget an expert that this node has given up."""
        self._progress.pop(uid, None)
        self.taken.pop(uid, None)
        self.shelf.forget(uid)

    async def fill(self, uid: str, backend: ExpertBackend) -> bool:
        """Give an expert the state of another node that serves it; False if nobody else does, or answers.

        Where they do not answer, the expert counts as one that has learnt nothing, until it has averaged with them.

        Raises:
          StateUnavailable: one of those who serve it lives, and gave no state of use.
        """
        try:
            taken = await fetch_state(self._holder, uid, backend)
        except StateUnavailable as error:
            self.not_taken[str(error)] += 1
            if not isinstance(error, HoldersSilent):
                raise
            self.progress(uid).missed()
            return False
        if taken is None:
            return False
        self.taken[uid] = taken
        self.progress(uid).met(taken)
        return True

    async def fetch_states(self, on_progress: Callable[[str], None]) -> None:
        """Give each expert that others serve the state that it has there, before this node answers for it."""
        backends, own = self._holder.backends, self._holder.contact.peer_id
        found = await find_replicas(self._holder.peer.dht, [parse_uid(uid) for uid in backends])
        served = [uid for uid in backends if any(each.contact.peer_id != own for each in found[parse_uid(uid)])]
        limit = trio.CapacityLimiter(_MAX_FETCHES)

        async def fetch(uid: str) -> None:
            async with limit:
                try:
                    await self.fill(uid, backends[uid])
                except StateUnavailable:  # this node was told to serve it, and does
                    self.progress(uid).missed()

        await for_each(fetch, served)
        if served:
            on_progress(f"{len(self.taken)} of {len(served)} experts begin as copies of those that others serve")
        if missing := [uid for uid in served if uid not in self.taken]:
            logger.warning(
                "%d experts are served by others whose state could not be had (%s), among them %s",
                len(missing),
                ", ".join(self.not_taken) or "they are gone",
                missing[0],
            )

    def status(self) -> dict[str, Any]:
        """Its part of `node.status`: `averages` made (experts, summed over rounds), averages `failed` by reason, states
        `taken` from others and `given` to them, and those `not_taken` by reason."""
        return {
            "averages": self.averager.averages,
            "failed": dict(self.averager.failed),
            "taken": len(self.taken),
            "given": self.shelf.given,
            "not_taken": dict(self.not_taken),
        }

    def facts(self) -> dict[str, Value]:
        """Facts for the node's entry as a member: averages that were made, and that failed."""
        return {"averages": self.averager.averages, "averages_failed": self.averager.failed.total()}

    async def run(self) -> None:
        """Average with others, and put away states that nobody fetches, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.averager.run)
            while True:
                await trio.sleep(_TIDY_S)
                self.shelf.close_idle()


@asynccontextmanager
async def replicating(holder: Holder, on_progress: Callable[[str], None]) -> AsyncIterator[Replicas | None]:
    """As long as the block lasts, experts are replicas of those that others serve, with their states to begin with;
    where one holder is wanted they are not, and nothing is yielded.

    Averages run, and states are given to newcomers. The block is to announce the experts, by what it is given.

    Args:
      on_progress: told how many states were taken from others.

    Raises:
      ValueError: this peer serves replicas already.
    """
    if not holder.config.replicates:
        yield None
        return
    replicas = Replicas(holder)
    try:
        averager = replicas.averager
        methods = {MEET: averager.serve_meet, LEARNT: averager.learnt.serve, STATE: replicas.shelf.serve}
        with handlers(holder.peer.rpc, methods):
            async with background_nursery() as nursery:
                await replicas.fetch_states(on_progress)
                nursery.start_soon(replicas.run)
                yield replicas
    finally:
        replicas.shelf.close()
        replicas.averager.close()
