"""The state of an expert from a living replica: for one that begins, or that takes over.

The node that has it opens it when it is asked (`expert.state`), and then serves it in pieces as any donor's state
(`dmoe_net.averaging.state`), under a name that follows from swarm and expert. A few are open at a time: each may hold
snapshots, which are whole experts in memory.

    expert.state   {"uid"} -> {"updates": the optimiser steps that the expert has taken}

The last array of the state has the names of the requests that the expert has learnt from, uint8 [names, 16]
(`dmoe_jax.replicas.learnt`).
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import jax
import numpy as np
import trio

from dmoe_jax.arrays import PyTree, sent
from dmoe_jax.averaging.donor import table_of
from dmoe_jax.directory.directory import find_replicas
from dmoe_jax.directory.grid import parse_uid
from dmoe_jax.machine.device import Device
from dmoe_jax.node.backend import MOST_REMEMBERED, ExpertBackend
from dmoe_jax.node.queue import NAME_BYTES
from dmoe_jax.node.saving import is_sound
from dmoe_jax.replicas.learnt import packed, unpacked
from dmoe_net.averaging.state.buffer import Table
from dmoe_net.averaging.state.download import StateUnavailable, download_state
from dmoe_net.averaging.state.sharing import SharedState, StateSharing, StateSharingConfig, StateSource
from dmoe_net.dht.node import DhtNode
from dmoe_net.errors import CallRefused, NetError, PeerBusy
from dmoe_net.identity import Contact
from dmoe_net.rpc.base import Caller, Reply, Request, read_request
from dmoe_net.wire.fields import text
from dmoe_net.wire.tensors import plain

STATE = "expert.state"
"""The method by which a newcomer asks for an expert's state to be opened."""

MAX_OPEN = 4
"""States that are served at once; one that nobody has fetched for `_IDLE_S` makes room."""

_IDLE_S = 10.0
_OPEN_TIMEOUT_S = 5.0
_RETRY_S = 2.0
_ATTEMPTS = 3
_UID = text(1, 256)


class StateShelf:
    """Serves the states of a node's experts to those who ask.

    Args:
      caller: serves the calls. dht: as of `StateSharing`.
      swarm: its name.
      backends: the experts by uid.
      device: copies their state between two batches.
      on_given: told the uid, and the updates of the state that somebody gets.
    """

    def __init__(
        self,
        caller: Caller,
        dht: DhtNode,
        *,
        swarm: str,
        backends: Mapping[str, ExpertBackend],
        device: Device,
        on_given: Callable[[str, int], None],
    ) -> None:
        self._caller = caller
        self._dht = dht
        self._swarm = swarm
        self._backends = backends
        self._device = device
        self._on_given = on_given
        self._open: dict[str, tuple[StateSharing, ExitStack, float]] = {}  # with the time when it was opened
        self.given = 0
        """Snapshots that were taken for others."""

    async def serve(self, request: Request) -> Reply:
        """Answer `expert.state`.

        Raises:
          CallRefused: no such expert is served here. PeerBusy: too many states are being fetched.
        """
        (uid,) = read_request(request, uid=_UID)
        if uid not in self._backends:
            raise CallRefused(f"unknown expert {uid[:80]!r}: its state is not to be had here")
        if uid not in self._open:
            self.close_idle(most=MAX_OPEN - 1)
            if len(self._open) >= MAX_OPEN:
                raise PeerBusy(f"{MAX_OPEN} states are being fetched", retry_after_s=_RETRY_S)
            sharing = self._sharing(uid)
            stack = ExitStack()
            stack.enter_context(sharing.serving())
            self._open[uid] = sharing, stack, trio.current_time()
        return Reply(body={"updates": self._backends[uid].update_count})

    def close_idle(self, *, most: int = 0) -> None:
        """Close what nobody fetches any more, until `most` are open or all others are being fetched."""
        for uid, (sharing, stack, opened_at) in list(self._open.items()):
            if len(self._open) > most and max(sharing.used_at, opened_at) < trio.current_time() - _IDLE_S:
                stack.close()
                del self._open[uid]

    def close(self) -> None:
        """Serve no state any more."""
        for _, stack, _ in self._open.values():
            stack.close()
        self._open.clear()

    def _sharing(self, uid: str) -> StateSharing:
        backend = self._backends[uid]

        async def snapshot() -> SharedState:
            updates, leaves = await self._device.run(_copied, backend)
            self.given += 1
            self._on_given(uid, updates)
            return SharedState(version=updates, tensors=leaves)

        source = StateSource(lambda: backend.update_count, snapshot)
        return StateSharing(
            self._caller,
            self._dht,
            prefix=_prefix(self._swarm, uid, backend),
            source=source,
            config=StateSharingConfig(),
        )


async def fetch_state(
    uid: str,
    backend: ExpertBackend,
    *,
    caller: Caller,
    dht: DhtNode,
    swarm: str,
    device: Device,
    rng: random.Random,
    timeout_s: float,
    failed: Counter[str] | None = None,
) -> int | None:
    """Give an expert the state of a node that serves it now.

    Nothing is believed unchecked: a state of other arrays, or one that is not finite, is not taken.

    Args:
      uid: the expert. backend: what gets its state; nobody else may load another one meanwhile.
      caller: asks the others, which are found in `dht`.
      swarm: its name.
      device: takes the state up between two batches.
      rng: draws what `download_state` draws.
      timeout_s: how long to try.
      failed: counts why a state could not be had, where others serve the expert.

    Returns: the updates of the state that was taken; None if no other node serves the expert, or none gave its state.
    """
    found = (await find_replicas(dht, [parse_uid(uid)]))[parse_uid(uid)]
    holders = [replica.contact for replica in found if replica.contact.peer_id != caller.peer_id]
    if not holders:
        return None
    failed = Counter() if failed is None else failed
    table, state = table_of(backend.state), None
    with trio.move_on_after(timeout_s):
        donors = await _opened(caller, holders, uid, failed)
        if not donors:
            return None
        try:
            state = await download_state(
                caller,
                dht,
                prefix=_prefix(swarm, uid, backend),
                rng=rng,
                config=StateSharingConfig(),
                timeout_s=timeout_s,
                attempts=_ATTEMPTS,
                expects=lambda version, offered: _fits(offered, table),
                accepts=lambda shared: is_sound(_like(backend.state, shared)),
                known=donors,
            )
        except StateUnavailable:
            failed["no state of use"] += 1
            return None
    if state is None:
        failed["too slow"] += 1
        return None
    await device.run(_load, backend, state)
    return state.version


async def _opened(caller: Caller, holders: list[Contact], uid: str, failed: Counter[str]) -> list[Contact]:
    """Those of the nodes that have opened the expert's state for us."""
    donors: list[Contact] = []

    async def ask(contact: Contact) -> None:
        try:
            while True:
                try:
                    await caller.call(contact, STATE, {"uid": uid}, timeout_s=_OPEN_TIMEOUT_S)
                    break
                except PeerBusy as busy:
                    await trio.sleep(busy.retry_after_s or _RETRY_S)
        except CallRefused:
            failed["it gives none"] += 1
        except NetError:
            failed["no answer"] += 1
        else:
            donors.append(contact)

    async with trio.open_nursery() as nursery:
        for contact in holders:
            nursery.start_soon(ask, contact)
    return [contact for contact in holders if contact in donors]


def _prefix(swarm: str, uid: str, backend: ExpertBackend) -> str:
    """Prefix of the states of an expert; another meaning has another prefix. Uids have dots, which prefixes may not."""
    named = f"{swarm}/{uid}/{backend.expert.meaning}"
    return f"expert-{hashlib.blake2b(named.encode(), digest_size=16).hexdigest()}"


def _copied(backend: ExpertBackend) -> tuple[int, tuple[np.ndarray, ...]]:
    """Count, copies and names of one moment: on the device's thread no batch can come between them."""
    leaves = (np.array(sent(leaf), copy=True) for leaf in jax.tree.leaves(backend.state))
    return backend.update_count, (*leaves, packed(backend.learnt_from))


def _fits(offered: Table, own: Table) -> bool:
    """Whether a state is of the arrays of our own, and has names."""
    if offered[:-1] != own or len(offered) != len(own) + 1:
        return False
    dtype, shape = offered[-1]
    return bool(dtype == "uint8" and shape[1:] == [NAME_BYTES] and shape[0] <= MOST_REMEMBERED)


def _like(state: PyTree, shared: SharedState) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(state), shared.tensors[:-1])


def _load(backend: ExpertBackend, shared: SharedState) -> None:
    names = unpacked(plain(shared.tensors[-1]))
    backend.load(_like(backend.state, shared), update_count=shared.version, learnt_from=names)
