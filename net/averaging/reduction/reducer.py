"""One part of the vector on its way from the members' values to their mean.

Theory of operation. Every sender brings the part chunk by chunk. A chunk is averaged when all senders that are still
in the game have brought it; it is the mean of what has arrived, weighted, summed in the order of the members: the
outcome does not depend on the order of arrival, and all members get the very same numbers, for they are computed once.

A clock runs for the *frontier* alone, the first chunk that is not averaged: whoever has not brought it within
`sender_timeout_s` of its becoming the frontier is out, for the rest of the part. So the frontier moves at least once in
that time: nobody waits longer for the next answer, however many senders fail one after the other; and a sender that
waits for answers itself (its window is full) is never taken for silent, as it may always send the frontier.

Out at once is whoever breaks the rules: brings what is not finite or of the wrong length, or far more ahead of the
answers than any window allows. A chunk that comes twice is refused, and the first one counts.

Nothing is added up before it is complete. It costs no memory, since the values that arrived stay where the network has
put them until their sender is answered; and one pass over all of them together is quicker than a pass for each.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from net.averaging.reduction.partition import MAX_WINDOW, Part
from net.errors import RemoteProtocolError
from net.wire.compression import Compression
from net.wire.tensors import Tensor, as_outgoing, as_received

Array = np.ndarray[Any, np.dtype[np.float32]]

_TILE_SIZE = 64 * 1024
"""Numbers that are averaged in one go: with the sum and a scratch they stay in the second-level cache."""


def mean_into(out: Array, values: Sequence[Array], weights: Sequence[float]) -> None:
    """Write the weighted mean to `out`, summed in the given order in float32.

    Weights count in relation to the largest, so that equal ones change nothing, and great ones do not overflow.

    Args:
      out: float32 of any length; none of `values` overlaps it.
      values: at least one, each of the length of `out`.
      weights: of each, above 0.
    """
    largest = max(weights)
    factors = [np.float32(weight / largest) for weight in weights]
    total = np.float32(math.fsum(weight / largest for weight in weights))
    scratch = np.empty(min(out.size, _TILE_SIZE), np.float32)
    # A sum beyond float32 becomes infinite, and whoever gets it refuses it.
    with np.errstate(over="ignore"):
        for start in range(0, out.size, _TILE_SIZE):
            tile = slice(start, start + _TILE_SIZE)
            mean = out[tile]
            np.multiply(values[0][tile], factors[0], out=mean)
            for each, factor in zip(values[1:], factors[1:], strict=True):
                scaled = each[tile] if factor == 1 else np.multiply(each[tile], factor, out=scratch[: mean.size])
                np.add(mean, scaled, out=mean)
            if total != 1:
                np.divide(mean, total, out=mean)


def is_finite(values: Array) -> bool:
    """Whether there is neither NaN nor infinity among them."""
    with np.errstate(all="ignore"):
        # Both survive in the sum of squares, which is quick; if that is infinite because finite values are large, they
        # are looked at one by one.
        return bool(np.isfinite(np.dot(values, values)) or np.isfinite(values).all())


def values_untrusted(tensors: Sequence[Tensor], size: int) -> Array:
    """The values that came with a call or an answer.

    Raises:
      RemoteProtocolError: they are not one float32 tensor of `size` finite numbers.
    """
    if len(tensors) != 1 or tensors[0].dtype != np.float32 or tensors[0].shape != (size,):
        got = ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors)
        raise RemoteProtocolError(f"expected one float32 tensor of {size} numbers, got {got or 'none'}")
    if not is_finite(tensors[0]):
        raise RemoteProtocolError("some of the values are not finite")
    return tensors[0]


class PartReduction:
    """What arrives for one part, and what becomes of it. Members are named by their place in the group.

    Args:
      part: what is reduced here.
      weights: of every member that sends, by member, ourselves included.
      own: our place, and our vector, of which the part is a part; None if we do not send.
      average: the vector to whose part the means are written. A chunk of it is final once it is finished.
      sender_timeout_s: see the head of this file.
      now: when this begins.
      compression: of what is sent. Our values lose in it what others' lose before the mean is taken, and get back the
        difference that the mean makes, as others do.
    """

    def __init__(
        self,
        part: Part,
        weights: Mapping[int, float],
        *,
        own: tuple[int, Array] | None,
        average: Array,
        sender_timeout_s: float,
        now: float,
        compression: Compression = Compression.NONE,
    ) -> None:
        self._part = part
        self._weights = dict(weights)
        self._own = own
        self._average = average
        self._compression = compression
        self._sender_timeout_s = sender_timeout_s
        self._awaited = set(weights) - ({own[0]} if own else set())
        self.lost: list[int] = []
        """The senders that are out, in the order in which they went."""
        self.room: dict[int, int] = {}
        """Chunks that a sender may be ahead of the answers, for those who may be more than `MAX_WINDOW`."""
        # Of chunks that are not finished and for which something has come. Of each sender as many as it has room for.
        self._arrived: dict[int, dict[int, Array]] = {}
        self.num_senders: list[int | None] = [None] * part.num_chunks
        """Vectors in the mean of each chunk. None: it is not finished; 0: nobody was left, and there is no mean."""
        self._frontier = 0
        self._frontier_since = now
        self._newly_finished: list[tuple[int, Array]] = []
        self._finish_complete(now)

    @property
    def is_done(self) -> bool:
        """All chunks are finished."""
        return self._frontier == self._part.num_chunks

    def deadline(self) -> float:
        """When to call `tick` next."""
        return math.inf if self.is_done else self._frontier_since + self._sender_timeout_s

    def take_finished(self) -> list[tuple[int, Array]]:
        """The chunks that were finished since this was last called, and their means."""
        finished, self._newly_finished = self._newly_finished, []
        return finished

    def receive_untrusted(self, sender: int, chunk: int, tensors: Sequence[Tensor], now: float) -> Array:
        """A sender brings a chunk, which nobody writes to any more.

        Args:
          chunk: a chunk of the part.
          tensors: as they came.

        Returns: the values.

        Raises:
          RemoteProtocolError: they do not count, and the message says why. Often the sender is out.
        """
        if sender not in self._awaited:
            raise RemoteProtocolError("nothing is expected from you here, or you were too late")
        try:
            values = values_untrusted(tensors, self._average[self._part.chunk(chunk)].size)
            room = self.room.get(sender, MAX_WINDOW)
            if sum(sender in arrived for arrived in self._arrived.values()) >= room:
                raise RemoteProtocolError(f"more than {room} chunks ahead of the answers")
        except RemoteProtocolError:
            self.drop(sender, now)
            raise
        arrived = self._arrived.get(chunk, {})
        if self.num_senders[chunk] is not None or sender in arrived:
            raise RemoteProtocolError("this chunk came before")
        arrived[sender] = values
        self._arrived[chunk] = arrived
        if len(arrived) == len(self._awaited):
            self._finish(chunk, now)
        return values

    def drop(self, sender: int, now: float) -> None:
        """The sender has failed: what is not finished goes on without it. Nothing happens if it is out already."""
        if sender in self._awaited:
            self._awaited.remove(sender)
            self.lost.append(sender)
            for arrived in self._arrived.values():
                arrived.pop(sender, None)
            self._finish_complete(now)

    def tick(self, now: float) -> None:
        """Go on without those who keep the frontier waiting, if it has waited long enough."""
        if now >= self.deadline():
            for sender in sorted(self._awaited - self._arrived.get(self._frontier, {}).keys()):
                self.drop(sender, now)

    def _finish_complete(self, now: float) -> None:
        """Finish all chunks for which nobody is awaited any more."""
        chunks = sorted(self._arrived) if self._awaited else range(self._frontier, self._part.num_chunks)
        for chunk in chunks:
            is_open = self.num_senders[chunk] is None
            if is_open and len(self._arrived.get(chunk, ())) == len(self._awaited):
                self._finish(chunk, now)

    def _finish(self, chunk: int, now: float) -> None:
        where = self._part.chunk(chunk)
        values = self._arrived.pop(chunk, {})
        mean = average = self._average[where]
        if self._own is not None:
            index, vector = self._own
            values[index] = vector[where]
            if self._compression is not Compression.NONE:
                values[index] = as_received(as_outgoing(vector[where], self._compression))
                mean = np.empty_like(average)
        senders = sorted(values)
        if senders:
            mean_into(mean, [values[each] for each in senders], [self._weights[each] for each in senders])
            if mean is not average:
                np.subtract(mean, values[index], out=average)
                np.add(average, vector[where], out=average)
        self.num_senders[chunk] = len(senders)
        self._newly_finished.append((chunk, mean))
        while not self.is_done and self.num_senders[self._frontier] is not None:
            self._frontier += 1
            self._frontier_since = now
