"""Settings of an expert node."""

import math
from dataclasses import dataclass
from typing import Literal

from dmoe_net.dht.entries import MAX_LIFE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Settings of an expert node."""

    swarm: str = "dmoe"
    """Name under which the node is listed in the DHT."""
    max_batch_rows: int = 256
    """Most rows of one XLA call, and of one request."""
    warm_up_rows: int = 16
    """Most rows for which programs are compiled before the experts are announced, on a device that compiles aside.
    0: none is."""
    max_waiting_rows: int = 4096
    """Most rows in the queue of a device; beyond it requests are answered "busy". 16 full batches: about as long as a
    trainer waits before it goes on without us."""
    announce_period_s: float = 10.0
    """Seconds between announcements in the DHT."""
    record_lifetime_s: float = 30.0
    """Seconds for which an announcement is valid: three periods, so that one lost announcement does no harm."""
    max_wait_s: float = 10.0
    """Most seconds of work in the queue of a device; beyond it too. Whoever waits longer has given up: it is the
    time-out of `Swarm.mixture`. Infinity: any."""
    forward_head_start_s: float = 0.1
    """Forward requests go ahead of backward ones that came at most so many seconds before them. Under load more rows
    then share an optimiser's step, and all of them are served sooner; what is asked alone waits for nobody. 0: all in
    order of arrival."""
    max_queue_delay_s: float = 5e-3
    """A batch that takes at least four times as long waits for those who shared the last one with it, at most so many
    seconds from its answer, while nothing else is to be done. 0: none waits."""
    max_concurrent_calls: int = 4096
    """Calls of one method in progress at once, waiting ones included. As many as `max_waiting_rows`: a call that finds
    no room in the queue is told when to come back, one beyond this bound only that the node is busy."""
    leave_timeout_s: float = 5.0
    """A node that leaves answers what it has accepted, for at most so many seconds; 0 drops it."""
    strategy: Literal["auto", "single", "stacked"] = "auto"
    """Programs of experts: "single", each has its own; "stacked", many of a kind share one; "auto", as their size and
    the device suggest. See `dmoe_jax.node.stacked`."""

    def __post_init__(self) -> None:
        if self.max_batch_rows < 1:
            raise ValueError(f"max_batch_rows must be at least 1, got {self.max_batch_rows}")
        if self.warm_up_rows < 0:
            raise ValueError(f"warm_up_rows must not be negative, got {self.warm_up_rows}")
        if not self.announce_period_s > 0:
            raise ValueError(f"announce_period_s must be positive, got {self.announce_period_s}")
        if self.strategy not in ("auto", "single", "stacked"):
            raise ValueError(f"strategy must be one of auto, single, stacked, got {self.strategy!r}")
        for name in ("leave_timeout_s", "forward_head_start_s", "max_queue_delay_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or a number of seconds, got {getattr(self, name)}")
        if not self.max_wait_s > 0:
            raise ValueError(f"max_wait_s must be a number of seconds above 0, got {self.max_wait_s}")
        if self.record_lifetime_s <= self.announce_period_s:
            raise ValueError(
                f"record_lifetime_s must exceed announce_period_s, or experts vanish between announcements; "
                f"got {self.record_lifetime_s} and {self.announce_period_s}"
            )
        if self.record_lifetime_s > MAX_LIFE_S:
            raise ValueError(f"announcements live for at most {MAX_LIFE_S:g} s, got {self.record_lifetime_s:g}")
