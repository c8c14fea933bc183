"""How much each expert can do: what a balanced router's fair shares are in proportion to (`Traffic.capacity`).

An expert shares its machine with others, and machines differ. How long a node takes is known in two ways, and the one
that says "slower" counts: from the trainer's own calls, whose time includes the way there and back, and from what the
node publishes beside its announcement, the seconds that a call has lately spent with it, whoever's call it was. So a
node that others overload loses our traffic before we have waited for it ourselves. An expert on a node that takes
twice as long as the median one of its layer has half the capacity, which halves its fair share of the calls. A node of
which nothing is known counts as the median: newcomers find work.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import trio

from dmoe_jax.routing.beam_search import Coordinates
from net.identity import Contact, PeerId
from net.types import Array

LEAST_CAPACITY = 0.02
"""Of a living expert, however slow: without any call nobody would see that it has recovered."""
MEMORY_S = 60.0
"""For how long a host's last call says something about it, seconds."""
_WEIGHT = 0.1
"""Of the newest call in a host's moving mean."""
MAX_HOSTS = 4096
"""Most hosts whose times are remembered."""


class CallTimes:
    """How long one process's calls to each host take, by method: moving means, forgotten after `MEMORY_S`."""

    def __init__(self) -> None:
        self._means: dict[
            tuple[str, PeerId], tuple[float, float]
        ] = {}  # -> (mean, when it was noted last), oldest first

    def note(self, method: str, host: PeerId, seconds: float) -> None:
        """A call took so long, or was given up after so long."""
        key, now = (method, host), trio.current_time()
        before = self._means.pop(key, None)
        known = before is not None and now - before[1] <= MEMORY_S
        mean = before[0] + _WEIGHT * (seconds - before[0]) if before is not None and known else seconds
        self._means[key] = (mean, now)
        if len(self._means) > MAX_HOSTS:
            del self._means[next(iter(self._means))]

    def slowness(self, hosts: Iterable[PeerId]) -> dict[PeerId, float]:
        """How many times as long as the median of these hosts each takes; without those of which nothing is known."""
        hosts, now = tuple(dict.fromkeys(hosts)), trio.current_time()
        found: dict[PeerId, list[float]] = {}
        for method in sorted({method for method, _ in self._means}):
            means = {}
            for host in hosts:
                mean, noted_at = self._means.get((method, host), (0.0, -np.inf))
                if now - noted_at <= MEMORY_S:
                    means[host] = mean
            for host, ratio in relative_to_median(means).items():
                found.setdefault(host, []).append(ratio)
        return {host: statistics.fmean(ratios) for host, ratios in found.items()}


def relative_to_median(values: Mapping[PeerId, float]) -> dict[PeerId, float]:
    """Each value over the median of all; nothing where that is 0."""
    median = statistics.median(values.values()) if values else 0.0
    return {host: value / median for host, value in values.items()} if median > 0 else {}


def grid_capacity(
    living: Mapping[Coordinates, Contact], grid_size: Sequence[int], *ratios: Mapping[PeerId, float]
) -> Array:
    """float32 of the grid's shape: 1 for an expert on a host that is as fast as the median, less for slower ones.

    Args:
      living: the experts that are alive, and who serves them; the others have 0.
      grid_size: extents of the grid.
      ratios: how many times as long as the median a host takes; where several know a host, the largest counts.
    """
    capacity = np.zeros(tuple(grid_size), np.float32)
    for coordinates, contact in living.items():
        slowness = max((known.get(contact.peer_id, 1.0) for known in ratios), default=1.0)
        capacity[coordinates] = max(LEAST_CAPACITY, 1 / max(1.0, slowness))
    return capacity
