"""A replica of several processes in averages: how its processes find each other, and copy their state together.

A state on several processes is of use if all of its pieces are of one moment. So the processes copy theirs at the same
place in their programs and count these copies; a newcomer's first process fetches from the donor's first, is told
there which copy it has, and has its other processes fetch the same one from the donor's others.
"""

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import trio
from jax.experimental import multihost_utils

from dmoe_jax.arrays import PyTree, sent
from dmoe_jax.mesh.shards import check_on_all_processes, held_pieces, tree_spans_processes
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_net.averaging.replica import MAX_PROCESSES, Replica, open_replica
from dmoe_net.averaging.state.buffer import Table
from dmoe_net.averaging.state.download import download_state
from dmoe_net.averaging.state.sharing import SharedState, StateSharing, StateSharingConfig, StateSource
from dmoe_net.dht.messages import contact_to_wire, parse_contact_untrusted
from dmoe_net.errors import CallRefused, NetError, RemoteProtocolError
from dmoe_net.identity import Contact
from dmoe_net.types import Array
from dmoe_net.wire.fields import integer, rows

_CONTACT_BYTES = 512
_HASH_BYTES = 16
_CONFIG = StateSharingConfig(snapshot_period_s=0.0, max_lag=0)
_FETCH_TIMEOUT_S = 120.0
_FETCH_ATTEMPTS = 6
_SERIAL = integer(1, 2**62)


@asynccontextmanager
async def replica_of(peer: SwarmPeer, tree: PyTree, *, name: str, settings: str) -> AsyncIterator[Replica | None]:
    """The processes on whose devices a tree lies, as long as the block lasts; None if they are this one alone.

    All processes open it at the same time.

    Args:
      name: names what is averaged.
      settings: must be the same in all processes.

    Raises:
      ValueError: this process cannot be called, the tree lies on some of the processes only, or they have other
        settings.
      ReplicaLost: the others do not come.
    """
    if not tree_spans_processes(tree):
        yield None
        return
    check_on_all_processes(tree)
    if peer.rpc.address is None:
        raise ValueError(
            "a model over several processes is averaged piece by piece between processes: others must be able to call "
            'each of them, so open the swarm with listen="HOST:PORT"'
        )
    contact = Contact(peer.rpc.peer_id, peer.rpc.address).full
    told = hashlib.sha256(f"{name}\n{settings}".encode()).digest()[:_HASH_BYTES]
    contacts = await trio.to_thread.run_sync(_exchanged, contact, told)
    async with open_replica(peer.rpc, name=name, contacts=contacts, index=jax.process_index()) as replica:
        yield replica


def _exchanged(contact: str, told: bytes) -> list[Contact]:
    """The contacts of all processes, which call this at the same time."""
    own = np.zeros(_HASH_BYTES + _CONTACT_BYTES, np.uint8)
    encoded = told + contact.encode()
    own[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    found = np.asarray(multihost_utils.process_allgather(own), np.uint8).reshape(-1, own.size)
    if any(bytes(row[:_HASH_BYTES]) != told for row in found):
        raise ValueError("the processes of one replica were started with different settings")
    return [Contact.parse(bytes(row[_HASH_BYTES:]).rstrip(b"\0").decode()) for row in found]


def copied_pieces(tree: PyTree) -> tuple[Array, ...]:
    """Copies of all that this process holds of a tree, on the host, in the form that travels."""
    return tuple(np.array(sent(piece)) for leaf in jax.tree.leaves(tree) for piece in held_pieces(leaf))


@dataclass(slots=True, eq=False)
class ComingCopy:
    """A copy that newcomers wait for."""

    is_there: trio.Event = field(default_factory=trio.Event)
    state: SharedState | None = None


class CopyTogether:
    """This process's part in copies of a replica's state that all of its processes make.

    Args:
      prefix: of what is averaged, of this process's piece.
      is_of_use: True for a fetched state whose numbers can be used.
    """

    def __init__(
        self, replica: Replica, peer: SwarmPeer, *, prefix: str, is_of_use: Callable[[SharedState], bool]
    ) -> None:
        self.replica = replica
        self._peer = peer
        self._prefix = f"{prefix}.piece"
        self._is_of_use = is_of_use
        self._serial = 0
        self._kept: tuple[Array, ...] | None = None

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve this process's copies, where it is not the first."""
        if self.replica.leads:
            yield
            return
        source = StateSource(lambda: self._serial, self._copy)
        sharing = StateSharing(self._peer.rpc, self._peer.dht, prefix=self._prefix, source=source, config=_CONFIG)
        with sharing.serving():
            yield

    def took(self, tensors: tuple[Array, ...]) -> Mapping[str, Any]:
        """Note a copy that all processes have made; return the facts by which newcomers find its pieces."""
        self._serial += 1
        self._kept = None if self.replica.leads else tensors
        return {"copy": self._serial, "processes": list(map(contact_to_wire, self.replica.contacts))}

    async def fetch_untrusted(self, facts: Mapping[str, Any], table: Table) -> Sequence[Array] | None:
        """Fetch this process's pieces of a donor's copy, which its first process told of; None if they do not come."""
        try:
            serial = _SERIAL.of_untrusted(facts, "copy")
            contacts = rows(MAX_PROCESSES).of_untrusted(facts, "processes")
            if len(contacts) != self.replica.size:
                raise RemoteProtocolError(f"expected {self.replica.size} processes, got {len(contacts)}")
            donor = parse_contact_untrusted(contacts[self.replica.index])
            state = await download_state(
                self._peer.rpc,
                self._peer.dht,
                prefix=self._prefix,
                rng=self._peer.rng,
                config=_CONFIG,
                min_version=serial,
                timeout_s=_FETCH_TIMEOUT_S,
                attempts=_FETCH_ATTEMPTS,
                expects=lambda version, offered: version == serial and offered == table,
                accepts=self._is_of_use,
                known=[donor],
            )
        except NetError:
            return None
        return None if state is None else state.tensors

    async def _copy(self) -> SharedState:
        if self._kept is None:
            raise CallRefused("no copy of this replica's state was made")
        kept, self._kept = self._kept, None
        return SharedState(version=self._serial, tensors=kept)
