"""Capacities of experts, to which a balanced router's fair shares are in proportion (`Traffic.capacity`).

The time that a node takes is known from the trainer's own calls, the way there and back included, and from the seconds
that the node publishes beside its announcement, whoever called it. Our own calls count where there were any of late,
since what is published is up to twenty seconds old. An expert on a node that takes twice as long as the median one of
its layer has half the capacity. A node of which nothing is known counts as the median: newcomers find work.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dmoe_jax.directory.grid import Coordinates
from dmoe_net.identity import Contact, PeerId
from dmoe_net.types import Array

LEAST_CAPACITY = 0.1
"""Capacity of a living expert, however slow: without any call nobody would see that it has recovered."""
MEMORY_S = 30.0
"""Seconds for which a host's last call says something about it."""
_WEIGHT = 0.4
"""Weight of the newest call in a host's moving mean: a host that has lost its calls must soon get them back."""
_COMMON_WEIGHT = 0.02
"""Weight of the newest call in the time that a method takes at all hosts."""
_SHORTEST_S = 1e-6
"""Least seconds of a call: in virtual time one may take none."""
MAX_HOSTS = 4096
"""Most hosts whose times are remembered."""


class CallTimes:
    """Times of one process's calls to each host, beside others of the same method: moving means of ratios.

    The means are geometric: after arithmetic ones a host that has recovered from being ten times slower would look slow
    for many more calls than it took to notice.
    """

    def __init__(self) -> None:
        self._methods: dict[str, float] = {}
        """Method -> mean of the logarithm of seconds, at all hosts."""
        self._hosts: dict[PeerId, tuple[float, float]] = {}
        """Host -> mean of the logarithm of its ratio to that, and when it was noted last; oldest first."""

    def note(self, method: str, host: PeerId, seconds: float, now: float) -> None:
        """Note a call that has ended `now`, or was given up."""
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
        """The time that each of these hosts takes over the median of all; without those of which nothing is known."""
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
      living: the experts that are alive, and the nodes that serve them; the others have 0.
      grid_size: extents of the grid.
      slowness: a host's time over the median; 1 for hosts that are not in it.
    """
    capacity = np.zeros(tuple(grid_size), np.float32)
    for coordinates, contact in living.items():
        capacity[coordinates] = max(LEAST_CAPACITY, 1 / max(1.0, slowness.get(contact.peer_id, 1.0)))
    return capacity
