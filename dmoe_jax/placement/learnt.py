"""Requests learnt from by the copies of an expert, told to one another: a retry at another copy trains nothing twice.

A trainer whose call was cut off asks again, maybe another copy of the expert. That copy has learnt from the request too
once it has an average with the first one's state in it, or has taken that state over. So the names of the requests
(`ExpertBackend.learnt_from`) go where the state goes: those of the same moment, and of as many requests as an expert
remembers.

    replica.learnt   {"group": the id of the group that averages}
                     -> two tensors: int64 [experts], how many names each expert of the bundle has, in their order;
                        uint8 [names, 16], all of them

It is answered when the one who is asked has its part of that average ready. Names are hashes (`queue.name_of`): they
tell nothing to who does not know the requests.
"""

import logging
from collections.abc import Iterable, Sequence

import numpy as np
import trio

from dmoe_jax.node.backend import MOST_REMEMBERED
from dmoe_jax.node.queue import NAME_BYTES
from dmoe_net.averaging.grouping.group import GROUP_ID_BYTES
from dmoe_net.errors import CallRefused, NetError, RemoteProtocolError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.nursery import for_each
from dmoe_net.rpc.base import Caller, Reply, Request, read_request
from dmoe_net.types import Array
from dmoe_net.wire.fields import octets
from dmoe_net.wire.tensors import plain

logger = logging.getLogger(__name__)

LEARNT = "replica.learnt"
"""The method by which replicas ask what is in each other's part of an average."""

MOST_NAMES = 4 * MOST_REMEMBERED
"""That travel at once, 4 MiB; a member who had more would fill the others' memory. Of more, each expert tells an equal
share, its newest."""

_GROUP = octets(GROUP_ID_BYTES, GROUP_ID_BYTES)


class LearntNames:
    """Names of the requests that this node's experts had learnt from when it sent their parts of a round's averages.

    Args:
      timeout_s: how long others wait here for an answer, at most, and this node for theirs.
    """

    def __init__(self, caller: Caller, *, timeout_s: float) -> None:
        self._caller = caller
        self._timeout_s = timeout_s
        self._offered: dict[bytes, tuple[Array, Array]] = {}  # by group
        self._news = trio.Event()

    def begin_round(self) -> None:
        """Forget what was offered in the round before: nobody averages that any more."""
        self._offered.clear()

    def offer(self, group_id: bytes, names: Sequence[Sequence[bytes]]) -> None:
        """Tell those of a group, when they ask, the names of each expert of its bundle, oldest first."""
        if sum(map(len, names)) > MOST_NAMES:
            share = MOST_NAMES // len(names)
            names = [each[max(0, len(each) - share) :] for each in names]
        counts = np.array([len(each) for each in names], np.int64)
        self._offered[group_id] = counts, packed(name for each in names for name in each)
        self._news.set()
        self._news = trio.Event()

    async def serve(self, request: Request) -> Reply:
        """Answer `replica.learnt`, once there is an answer.

        Raises:
          CallRefused: there is none in time: this node averages nothing with such a group.
        """
        (group_id,) = read_request(request, group=_GROUP)
        with trio.move_on_after(self._timeout_s):
            while group_id not in self._offered:
                await self._news.wait()
        if group_id not in self._offered:
            raise CallRefused("this node has no part in an average of that group")
        return Reply(tensors=self._offered[group_id])

    async def of_others(
        self, group_id: bytes, others: Iterable[Contact], num_experts: int
    ) -> tuple[list[list[bytes]], set[PeerId]]:
        """Ask the others of a group.

        Returns: (the names of each expert, from all who told; those who did not).
        """
        found: list[list[bytes]] = [[] for _ in range(num_experts)]
        silent: set[PeerId] = set()

        async def ask(contact: Contact) -> None:
            try:
                reply = await self._caller.call(contact, LEARNT, {"group": group_id}, timeout_s=self._timeout_s)
                told = _names_of_untrusted(reply, num_experts)
            except NetError as error:
                logger.info("node %s does not say what its experts have learnt from: %s", contact, error)
                silent.add(contact.peer_id)
            else:
                for names, more in zip(found, told, strict=True):
                    names.extend(more)

        await for_each(ask, others)
        return found, silent


def packed(names: Iterable[bytes]) -> Array:
    """Names as an array that travels, uint8 [names, 16]."""
    return np.frombuffer(b"".join(names), np.uint8).reshape(-1, NAME_BYTES)


def unpacked(names: Array) -> list[bytes]:
    """The names of such an array."""
    octets_of_all = names.tobytes()
    return [octets_of_all[start : start + NAME_BYTES] for start in range(0, len(octets_of_all), NAME_BYTES)]


def _names_of_untrusted(reply: Reply, num_experts: int) -> list[list[bytes]]:
    """The names of each expert.

    Raises:
      RemoteProtocolError: the answer is none.
    """
    tensors = [plain(tensor) for tensor in reply.tensors]
    if [(each.dtype, each.ndim) for each in tensors] != [(np.dtype(np.int64), 1), (np.dtype(np.uint8), 2)]:
        said = [f"{each.dtype}{list(each.shape)}" for each in tensors]
        raise RemoteProtocolError(f"expected int64 [experts] and uint8 [names, {NAME_BYTES}], got {said}")
    counts, names = tensors
    fits = counts.shape == (num_experts,) and bool(((counts >= 0) & (counts <= MOST_REMEMBERED)).all())
    if not fits or names.shape != (counts.sum(), NAME_BYTES) or len(names) > MOST_NAMES:
        raise RemoteProtocolError(
            f"expected the names of {num_experts} experts, up to {MOST_REMEMBERED} each and {MOST_NAMES} in all, "
            f"got {counts.tolist()[:4]} for {counts.size} and {list(names.shape)} in all"
        )
    every, start, told = unpacked(names), 0, []
    for count in counts.tolist():
        told.append(every[start : start + count])
        start += count
    return told
