"""How long a slice goes on, and what it took: wall time, and processor time of both processes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.transport_speed.ratios import Slice

_MAX_SLICES = 5
"""A slice that wants more calls than its time allows goes on for at most so many times as long: a machine under load
measures less, but comes to an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When a slice ends.

    Attributes:
      slice_s: it takes at least so long.
      min_calls: and at least so many calls, if they fit into five times that.
      warm_up_calls: made before, on the same connection, and not counted.
    """

    slice_s: float
    min_calls: int = 1
    warm_up_calls: int

    def goes_on(self, elapsed_s: float, calls: int) -> bool:
        """Whether one more call is to be made."""
        return elapsed_s < self.slice_s or (calls < self.min_calls and elapsed_s < _MAX_SLICES * self.slice_s)


class Stopwatch:
    """Times one slice after the other.

    Args:
      server_cpu_s: asks the server's process for its processor time.
    """

    def __init__(self, server_cpu_s: Callable[[], float]) -> None:
        self._server_cpu_s = server_cpu_s
        self._server_start = self._client_start = self._start = 0.0

    def start(self) -> None:
        """Now, once the server has told its processor time."""
        self._server_start = self._server_cpu_s()
        self._client_start = time.process_time()
        self._start = time.perf_counter()

    def elapsed_s(self) -> float:
        """Seconds since `start`."""
        return time.perf_counter() - self._start

    def stop(self, latencies_s: Sequence[float], *, nbytes: int, calls: int) -> Slice:
        """What happened since `start`."""
        wall_s = self.elapsed_s()
        client_cpu_s = time.process_time() - self._client_start
        return Slice(
            calls=calls,
            nbytes=nbytes,
            wall_s=wall_s,
            client_cpu_s=client_cpu_s,
            server_cpu_s=self._server_cpu_s() - self._server_start,
            latencies_s=() if nbytes else tuple(latencies_s),
        )
