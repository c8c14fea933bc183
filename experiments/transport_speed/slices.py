"""A slice is one uninterrupted measurement: which calls it makes, how long it goes on, and what it took."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

ECHO, TAKE, GIVE = "echo", "take", "give"
"""Actions of a server on a call: echo a small message, take a tensor, or give one."""

_MAX_SLICES = 5
"""A slice that wants more calls than its time allows goes on for at most so many times as long: a machine under load
measures less, but comes to an end."""


@dataclass(kw_only=True)
class SliceTimer:
    """Times one slice: the warm-up calls, `start`, then calls as long as it `goes_on`, then its `record`."""

    server_cpu_s: Callable[[], float]
    """Asks the server's process for its processor time, seconds."""
    slice_s: float
    """The slice takes at least so long."""
    warm_up_calls: int
    """Calls that are made before, on the same connection, and not counted."""
    min_calls: int = 1
    """The slice has at least so many calls, if they fit into five times its duration."""
    nbytes: int = 0
    """Payload of each transfer, bytes; 0 for small calls."""
    latencies_s: list[float] = field(default_factory=list)
    """Seconds that each call took so far; the caller appends to it."""
    _started: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def start(self) -> None:
        """Begin, once the server has told its processor time."""
        self._started = (self.server_cpu_s(), time.process_time(), time.perf_counter())

    def goes_on(self) -> bool:
        """Say whether one more call is to be made."""
        return self.goes_on_at(time.perf_counter() - self._started[2])

    def goes_on_at(self, elapsed_s: float) -> bool:
        """Say whether one more call is to be made, so many seconds after the start."""
        lacks_calls = len(self.latencies_s) < self.min_calls
        return elapsed_s < self.slice_s or (lacks_calls and elapsed_s < _MAX_SLICES * self.slice_s)

    def record(self) -> dict[str, float]:
        """End the slice and return its quantities."""
        wall_s = time.perf_counter() - self._started[2]
        client_cpu_s = time.process_time() - self._started[1]
        ends = {"client_cpu_s": client_cpu_s, "server_cpu_s": self.server_cpu_s() - self._started[0]}
        return slice_record(self.latencies_s, nbytes=self.nbytes, wall_s=wall_s, **ends)


def slice_record(
    latencies_s: Sequence[float], *, nbytes: int, wall_s: float, client_cpu_s: float, server_cpu_s: float
) -> dict[str, float]:
    """Compute a slice's quantities: of transfers the bytes per second and their price, of small calls the calls per
    second and two percentiles."""
    calls = len(latencies_s)
    record = {"calls": calls, "wall_s": wall_s, "client_cpu_s": client_cpu_s, "server_cpu_s": server_cpu_s}
    if nbytes:
        gigabytes = nbytes * calls / 1e9
        cpu_s_per_gigabyte = (client_cpu_s + server_cpu_s) / gigabytes
        return record | {"gigabytes_per_s": gigabytes / wall_s, "cpu_s_per_gigabyte": cpu_s_per_gigabyte}
    percentiles = {f"p{percent}_ms": 1e3 * percentile(latencies_s, percent) for percent in (50, 99)}
    return record | {"calls_per_s": calls / wall_s} | percentiles


def percentile(samples: Sequence[float], percent: float) -> float:
    """Find the smallest sample that `percent` per cent of all do not exceed (nearest rank).

    Raises:
      ValueError: there are no samples, or `percent` is not in (0, 100].
    """
    if not samples or not 0 < percent <= 100:
        raise ValueError(f"expected samples and a percentage in (0, 100], got {len(samples)} samples and {percent}")
    return sorted(samples)[math.ceil(len(samples) * percent / 100) - 1]
