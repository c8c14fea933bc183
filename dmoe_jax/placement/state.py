"""The state of an expert from a living replica: for one that begins, or that takes over.

The node that has it opens it when it is asked (`expert.state`), and then serves it in pieces as any donor's state
(`dmoe_net.averaging.state`), under a name that follows from swarm and expert. A few are open at a time: each may hold
snapshots, which are whole experts in memory.

    expert.state   {"uid"} -> {"updates": the optimiser steps that the expert has taken}
"""

import hashlib
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress

import trio

from dmoe_jax.directory.directory import find_replicas, host_target
from dmoe_jax.directory.grid import parse_uid
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.placement import wire_form
from dmoe_jax.placement.holder import Holder
from dmoe_net.averaging.state.download import StateUnavailable, download_state
from dmoe_net.averaging.state.sharing import SharedState, StateSharing, StateSharingConfig, StateSource
from dmoe_net.errors import CallFailed, CallRefused, NetError, PeerBusy, PeerUnavailable, RemoteProtocolError
from dmoe_net.identity import Contact
from dmoe_net.nursery import background_nursery, for_each
from dmoe_net.peer_health import Pause
from dmoe_net.rpc.base import Caller, Reply, Request, read_request
from dmoe_net.rpc.liveness import ping
from dmoe_net.wire.fields import text

logger = logging.getLogger(__name__)

STATE = "expert.state"
"""The method by which a newcomer asks for an expert's state to be opened."""

MAX_OPEN = 4
"""States that are served at once; one that nobody has fetched for `_IDLE_S` makes room, or for `_DONE_S` if all of it
has been fetched."""

_IDLE_S = 10.0
_DONE_S = 0.5
_OPEN_TIMEOUT_S = 5.0
_SILENCE_S = 5.0
_RETRY_S = 0.5
_ATTEMPTS = 3
_SILENT = Pause(first_s=10.0, longest_s=60.0)
"""Announcements outlive their node: one that did not answer for the last expert is not asked for the next ones."""
_UID = text(1, 256)


class HoldersSilent(StateUnavailable):
    """Nodes are announced that serve the expert, and none of them answers."""


class StateShelf:
    """Serves the states of a node's experts to those who ask.

    Args:
      on_given: told the uid, and the updates of the state that somebody gets.
    """

    def __init__(self, holder: Holder, *, on_given: Callable[[str, int], None]) -> None:
        self._holder, self._on_given = holder, on_given
        self._open: dict[str, tuple[StateSharing, ExitStack, float]] = {}  # with the time when it was opened
        self.given = 0
        """Snapshots that were taken for others."""

    async def serve(self, request: Request) -> Reply:
        """Answer `expert.state`.

        Raises:
          CallRefused: no such expert is served here. PeerBusy: too many states are being fetched.
        """
        (uid,) = read_request(request, uid=_UID)
        if uid not in self._holder.backends:
            raise CallRefused(f"unknown expert {uid[:80]!r}: its state is not to be had here")
        if uid not in self._open:
            self.close_idle(most=MAX_OPEN - 1)
            if len(self._open) >= MAX_OPEN:
                raise PeerBusy(f"{MAX_OPEN} states are being fetched", retry_after_s=_RETRY_S)
            sharing = self._sharing(uid)
            stack = ExitStack()
            stack.enter_context(sharing.serving())
            self._open[uid] = sharing, stack, trio.current_time()
        return Reply(body={"updates": self._holder.backends[uid].update_count})

    def close_idle(self, *, most: int = 0) -> None:
        """Close what nobody fetches any more, until `most` are open or all others are being fetched."""
        for uid, (sharing, _, opened_at) in list(self._open.items()):
            idle_s = trio.current_time() - max(sharing.used_at, opened_at)
            if len(self._open) > most and idle_s > (_DONE_S if sharing.is_fetched else _IDLE_S):
                self.forget(uid)

    def forget(self, uid: str) -> None:
        """Serve the state of this expert no more."""
        if (opened := self._open.pop(uid, None)) is not None:
            opened[1].close()

    def close(self) -> None:
        """Serve no state any more."""
        for uid in list(self._open):
            self.forget(uid)

    def _sharing(self, uid: str) -> StateSharing:
        holder, backend = self._holder, self._holder.backends[uid]

        async def snapshot() -> SharedState:
            state = await holder.device.run(wire_form.shared, backend)
            self.given += 1
            self._on_given(uid, state.version)
            return state

        source = StateSource(lambda: backend.update_count, snapshot)
        return StateSharing(
            holder.peer.rpc,
            holder.peer.dht,
            prefix=_prefix(holder.swarm, uid, backend),
            source=source,
            config=StateSharingConfig(),
        )


async def fetch_state(holder: Holder, uid: str, backend: ExpertBackend) -> int | None:
    """Give an expert the state of another node that serves it now.

    Nothing is believed unchecked: a state of other arrays, or one that is not finite, is not taken.

    Args:
      backend: what gets the state; nobody else may load another one meanwhile.

    Returns: the updates of the state that was taken; None if no other node serves the expert.

    Raises:
      HoldersSilent: others are announced, and none of them answers, or none any more.
      StateUnavailable: others serve it, and their state cannot be had; the message says why in a few words.
    """
    caller, timeout_s = holder.peer.rpc, holder.config.fetch_timeout_s
    found = (await find_replicas(holder.peer.dht, [parse_uid(uid)]))[parse_uid(uid)]
    holders = [replica.contact for replica in found if replica.contact.peer_id != caller.peer_id]
    if not holders:
        return None
    now = trio.current_time()
    holders = [each for each in holders if not caller.health.blocks(host_target(each), now, _SILENT)]
    (fits, is_sound), state = wire_form.checks_of(backend), None
    donors, why_not = holders, "too slow"
    with trio.move_on_after(timeout_s):
        donors = await _opened(caller, holders, uid)
        try:
            async with background_nursery() as nursery:
                nursery.start_soon(_until_silent, caller, donors, nursery.cancel_scope)
                state = await download_state(
                    caller,
                    holder.peer.dht,
                    prefix=_prefix(holder.swarm, uid, backend),
                    rng=holder.peer.rng,
                    config=StateSharingConfig(),
                    timeout_s=timeout_s,
                    attempts=_ATTEMPTS,
                    expects=fits,
                    accepts=is_sound,
                    known=donors,
                )
        except StateUnavailable:
            why_not = "no state of use"
    if state is None:
        raise StateUnavailable(why_not) if await _any_lives(caller, donors) else HoldersSilent("no answer")
    await holder.device.run(wire_form.load, backend, state)
    return state.version


async def _until_silent(caller: Caller, donors: list[Contact], scope: trio.CancelScope) -> None:
    """Cancel once all donors have died: a piece of a state is waited for much longer."""
    while True:
        await trio.sleep(_SILENCE_S)
        if not await _any_lives(caller, donors):
            scope.cancel()


async def _any_lives(caller: Caller, donors: list[Contact]) -> bool:
    """True if a donor gives a sign of life."""
    living: list[Contact] = []

    async def look(contact: Contact) -> None:
        with suppress(PeerUnavailable):
            with suppress(CallFailed, RemoteProtocolError):
                await ping(caller, contact, silence_s=_SILENCE_S)
            living.append(contact)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for contact in donors:
            nursery.start_soon(look, contact)
    return bool(living)


async def _opened(caller: Caller, holders: list[Contact], uid: str) -> list[Contact]:
    """Those of the nodes that have opened the expert's state for us, at least one; raises as `fetch_state`."""
    donors: list[Contact] = []
    refused = False

    async def ask(contact: Contact) -> None:
        nonlocal refused
        try:
            while True:
                try:
                    await caller.call(contact, STATE, {"uid": uid}, timeout_s=_OPEN_TIMEOUT_S)
                    break
                except PeerBusy as busy:
                    await trio.sleep(busy.retry_after_s or _RETRY_S)
        except CallFailed:
            refused = True
        except NetError as error:
            logger.info("node %s, which is announced as a holder of %s, does not answer: %s", contact, uid, error)
        else:
            donors.append(contact)

    await for_each(ask, holders)
    if not donors:
        raise StateUnavailable("it gives none") if refused else HoldersSilent("no answer")
    return [contact for contact in holders if contact in donors]


def _prefix(swarm: str, uid: str, backend: ExpertBackend) -> str:
    """Prefix of the states of an expert; another meaning has another prefix. Uids have dots, which prefixes may not."""
    named = f"{swarm}/{uid}/{backend.expert.meaning}"
    return f"expert-{hashlib.blake2b(named.encode(), digest_size=16).hexdigest()}"
