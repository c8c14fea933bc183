"""The swarm's common time.

Expirations in the DHT are absolute times that many machines must agree on. `SwarmClock` anchors them to trio's clock:
on a real node swarm time starts at the wall clock and then runs monotonically; in virtual time it starts at zero, so
that nothing in a simulation ever reads a wall clock.
"""

import time

import trio


class SwarmClock:
    """Absolute swarm time in seconds. Only usable inside `trio.run`."""

    def __init__(self, *, start_s: float) -> None:
        self._offset_s = start_s - trio.current_time()

    @classmethod
    def wall(cls) -> "SwarmClock":
        """Swarm time for a real node: Unix time now, monotonic from here on."""
        return cls(start_s=time.time())

    @classmethod
    def virtual(cls) -> "SwarmClock":
        """Swarm time for a simulation: trio's clock itself."""
        return cls(start_s=trio.current_time())

    def now(self) -> float:
        """Seconds of swarm time."""
        return trio.current_time() + self._offset_s
