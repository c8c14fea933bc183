"""How much each expert can do: what a balanced router's fair shares are in proportion to (`Traffic.capacity`).

An expert shares its machine with others, and machines differ. How long a node takes is known in two ways: from the
trainer's own calls, whose time includes the way there and back, and from what the node publishes beside its
announcement, the seconds that a call has lately spent with it, whoever's call it was. Our own calls count where there
were any of late, since what is published is up to twenty seconds old; of the nodes that we have not called, we know
from others whether they are overloaded. An expert on a node that takes twice as long as the median one of its layer has
half the capacity, which halves its fair share of the calls. A node of which nothing is known counts as the median:
newcomers find work.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dmoe_jax.routing.beam_search import Coordinates
from net.identity import Contact, PeerId
from net.types import Array

LEAST_CAPACITY = 0.1
"""Of a living expert, however slow: without any call nobody would see that it has recovered."""
MEMORY_S = 30.0
"""For how long a host's last call says something about it, seconds."""
_WEIGHT = 0.4
"""Of the newest call in a host's moving mean: a host that has lost its calls must not need many to get them back."""
_COMMON_WEIGHT = 0.02
"""Of the newest call in what a method takes at all hosts."""
_SHORTEST_S = 1e-6
"""What a shorter call counts as: in virtual time a call may take none."""
MAX_HOSTS = 4096
"""Most hosts whose times are remembered."""


class CallTimes:
    """How long one process's calls to each host take, beside others of the same method: moving means of ratios.

    The means are geometric. After arithmetic ones a host that has recovered from being ten times slower would look slow
    for many more calls than it took to notice, and it is asked seldom then.
    """

    def __init__(self) -> None:
        self._methods: dict[str, float] = {}
        """Method -> mean of the logarithm of seconds, at all hosts."""
        self._hosts: dict[PeerId, tuple[float, float]] = {}
        """Host -> mean of the logarithm of its ratio to that, and when it was noted last; oldest first."""

    def note(self, method: str, host: PeerId, seconds: float, now: float) -> None:
        """A call that has ended `now` took so long, or was given up after so long."""
        logarithm = math.log(max(seconds, _SHORTEST_S))
        common = self._methods.setdefault(method, logarithm)
        ratio = logarithm - common
        self._methods[method] = common + _COMMON_WEIGHT * ratio
        before, noted_at = self._hosts.pop(host, (ratio, now))
        if now - noted_at <= MEMORY_S:
            ratio = before + _WEIGHT * (ratio - before)
        self._hosts[host] = (ratio, now)
        if len(self._hosts) > MAX_HOSTS:
            del self._hosts[next(iter(self._hosts))]

    def slowness(self, hosts: Iterable[PeerId], now: float) -> dict[PeerId, float]:
        """How many times as long as the median of these hosts each takes; without those of which nothing is known."""
        oldest = now - MEMORY_S
        known = {host: self._hosts[host] for host in hosts if host in self._hosts}
        return relative_to_median(
            {host: math.exp(ratio) for host, (ratio, noted_at) in known.items() if noted_at >= oldest}
        )


def relative_to_median(values: Mapping[PeerId, float]) -> dict[PeerId, float]:
    """Each value over the median of all; nothing where that is 0."""
    median = statistics.median(values.values()) if values else 0.0
    return {host: value / median for host, value in values.items()} if median > 0 else {}


def grid_capacity(
    living: Mapping[Coordinates, Contact], grid_size: Sequence[int], slowness: Mapping[PeerId, float]
) -> Array:
    """float32 of the grid's shape: 1 for an expert on a host that is as fast as the median, less for slower ones.

    Args:
      living: the experts that are alive, and who serves them; the others have 0.
      grid_size: extents of the grid.
      slowness: how many times as long as the median a host takes; 1 for those that are not in it.
    """
    capacity = np.zeros(tuple(grid_size), np.float32)
    for coordinates, contact in living.items():
        capacity[coordinates] = max(LEAST_CAPACITY, 1 / max(1.0, slowness.get(contact.peer_id, 1.0)))
    return capacity
