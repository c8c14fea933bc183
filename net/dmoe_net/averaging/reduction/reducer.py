"""One part of the vector on its way from the members' values to their mean.

A chunk is averaged when all senders that are still in the game have brought it, in the order of the members: the
outcome does not depend on the order of arrival. Nothing is added up before it is complete, which costs no memory: the
values stay where the network has put them until their sender is answered.

A clock runs for the *frontier* alone, the first chunk that is not averaged: whoever has not brought it within
`sender_timeout_s` of its becoming the frontier is out, for the rest of the part. So nobody waits longer for the next
answer, however many senders fail one after the other; and a sender that waits for answers itself (its window is full)
is never taken for silent, as it may always send the frontier. Out at once is whoever breaks the rules.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from dmoe_net.averaging.reduction.partition import MAX_WINDOW, AllReduceConfig, Part
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.types import Array
from dmoe_net.wire.compression import Compression, compressed_in_place
from dmoe_net.wire.tensors import Outgoing, Tensor, as_outgoing, as_received

_TILE_SIZE = 64 * 1024
"""Numbers that are averaged in one go: with the sum and a scratch they stay in the second-level cache."""


def mean_into(out: Array, values: Sequence[Array], weights: Sequence[float]) -> None:
    """Write the weighted mean to `out`, summed in the given order in float32.

    Args:
      out: float32 of any length; none of `values` overlaps it.
      values: at least one, each of the length of `out`.
      weights: of each, 0 or more; where all are 0, the mean is 0. They count in relation to the largest, so that equal
        ones change nothing, and great ones do not overflow.
    """
    counting = [index for index, weight in enumerate(weights) if weight > 0]
    if not counting:
        out[:] = 0
        return
    values, weights = [values[index] for index in counting], [weights[index] for index in counting]
    largest = max(weights)
    factors = [np.float32(weight / largest) for weight in weights]
    total = np.float32(math.fsum(weight / largest for weight in weights))
    scratch = np.empty(min(out.size, _TILE_SIZE), np.float32)
    # A sum beyond float32 becomes infinite, and whoever gets it refuses it.
    with np.errstate(over="ignore"):
        for start in range(0, out.size, _TILE_SIZE):
            tile = slice(start, start + _TILE_SIZE)
            mean, first = out[tile], values[0][tile]
            # Multiplying by 1 would change nothing, and cost as much as adding.
            if factors[0] != 1 or len(values) == 1:
                first = np.multiply(first, factors[0], out=mean)
            for each, factor in zip(values[1:], factors[1:], strict=True):
                scaled = each[tile] if factor == 1 else np.multiply(each[tile], factor, out=scratch[: mean.size])
                first = np.add(first, scaled, out=mean)
            if total != 1:
                np.divide(mean, total, out=mean)


def is_finite(values: Array) -> bool:
    """True if there is neither NaN nor infinity among them."""
    with np.errstate(all="ignore"):
        # Both survive in the sum of squares, which is quick; if that is infinite because finite values are large, they
        # are looked at one by one.
        return bool(np.isfinite(np.dot(values, values)) or np.isfinite(values).all())


def values_untrusted(tensors: Sequence[Tensor], size: int) -> Array:
    """Return the values that came with a call or an answer, `size` finite numbers."""
    if len(tensors) != 1 or tensors[0].dtype != np.float32 or tensors[0].shape != (size,):
        got = ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors)
        raise RemoteProtocolError(f"expected one float32 tensor of {size} numbers, got {got or 'none'}")
    if not is_finite(tensors[0]):
        raise RemoteProtocolError("some of the values are not finite")
    return tensors[0]


class PartReduction:
    """The values that arrive for one part, and their means. Members are named by their place in the group.

    Args:
      weights: of every member that sends, ourselves included.
      own: our place, and our vector, of which the part is a part; None if we do not send.
      average: the vector to whose part the means are written.
    """

    def __init__(
        self,
        part: Part,
        weights: Mapping[int, float],
        *,
        own: tuple[int, Array] | None,
        average: Array,
        config: AllReduceConfig,
        now: float,
    ) -> None:
        self._part = part
        self._weights = dict(weights)
        self._own = own
        self._average = average
        self._compression = config.compression
        self.sends_differences = config.compression is not Compression.NONE and not config.is_identical
        """True if a mean leaves as its difference to what a sender brought."""
        self._sender_timeout_s = config.sender_timeout_s
        self._awaited = set(weights) - ({own[0]} if own else set())
        self._heard: set[int] = set()  # those who have brought something, and with it their weight
        self.lost: list[int] = []
        """Senders that are out, in the order in which they went."""
        self.room: dict[int, int] = {}
        """Chunks that a sender may be ahead of the answers, for those who may be more than `MAX_WINDOW`."""
        # Of chunks that are not finished and for which something has come. Of each sender as many as it has room for.
        self._arrived: dict[int, dict[int, Array]] = {}
        self.num_senders: list[int | None] = [None] * part.num_chunks
        """Number of vectors in each chunk's mean. None: it is not finished; 0: nobody was left, there is no mean."""
        self.total_weights: list[float] = [0.0] * part.num_chunks
        """Sum of their weights, once it is finished."""
        self._frontier = 0
        self._frontier_since = now
        self._newly_finished: list[tuple[int, Outgoing]] = []
        self._finish_complete(now)

    @property
    def is_done(self) -> bool:
        return self._frontier == self._part.num_chunks

    def deadline(self) -> float:
        """Time at which to call `tick` next."""
        return math.inf if self.is_done else self._frontier_since + self._sender_timeout_s

    def take_finished(self) -> list[tuple[int, Outgoing]]:
        """Return the chunks that were finished since the last call, and their means, as they may leave."""
        finished, self._newly_finished = self._newly_finished, []
        return finished

    def receive_untrusted(
        self,
        sender: int,
        chunk: int,
        tensors: Sequence[Tensor],
        now: float,
        *,
        weight: float | None = None,
    ) -> Array:
        """Take a chunk that a sender brings, which nobody writes to any more, and return its values.

        Args:
          weight: what the sender's vector counts, 0 or more; None: what was known from the beginning.
        """
        if sender not in self._awaited:
            raise RemoteProtocolError("nothing is expected from you here, or you were too late")
        try:
            values = values_untrusted(tensors, self._average[self._part.chunk(chunk)].size)
            self._weigh_untrusted(sender, weight)
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

    def _weigh_untrusted(self, sender: int, weight: float | None) -> None:
        """Take a sender's word for its weight, once."""
        known = self._weights[sender]
        if weight is not None and weight != known:
            if sender in self._heard:
                raise RemoteProtocolError(f"the weight of a vector does not change, got {weight!r} after {known!r}")
            self._weights[sender] = weight
        self._heard.add(sender)

    def drop(self, sender: int, now: float) -> None:
        """Go on without a sender that has failed. Nothing happens if it is out already."""
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
        average = self._average[where]
        if self._own is not None:
            values[self._own[0]] = self._own[1][where]
        finished: Outgoing = average
        if self._own is not None and self.sends_differences:
            finished = self._mean_by_difference(values, where)
        elif values:
            self._mean_into(average, values)
            if self._compression is not Compression.NONE and not self.sends_differences:
                finished = compressed_in_place(average, self._compression)
        self.num_senders[chunk] = len(values)
        self.total_weights[chunk] = math.fsum(self._weights[each] for each in values)
        self._newly_finished.append((chunk, finished))
        while not self.is_done and self.num_senders[self._frontier] is not None:
            self._frontier += 1
            self._frontier_since = now

    def _mean_into(self, out: Array, values: Mapping[int, Array]) -> None:
        senders = sorted(values)
        mean_into(out, [values[each] for each in senders], [self._weights[each] for each in senders])

    def _mean_by_difference(self, values: dict[int, Array], where: slice) -> Array:
        """The mean of the values as they would have been received, ours too; ours change by what it differs."""
        assert self._own is not None
        index, average = self._own[0], self._average[where]
        ours = values[index]
        values[index] = as_received(as_outgoing(ours, self._compression))
        mean = np.empty_like(average)
        self._mean_into(mean, values)
        np.subtract(mean, values[index], out=average)
        np.add(average, ours, out=average)
        return mean
