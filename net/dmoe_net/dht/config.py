"""Settings of a DHT node."""

from dataclasses import dataclass

from dmoe_net.peer_health import Pause


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtConfig:
    """Settings of a DHT node. Periods are jittered by +-25 % so that nodes started together do not act together."""

    bucket_size: int = 20
    """k of the paper: contacts a bucket."""
    depth_modulo: int = 5
    """b of the paper, section 4.2: buckets away from the own id split down to multiples of this depth."""
    replicas: int = 5
    """Peers that keep each record, and nearest peers that a reader asks."""
    parallelism: int = 8
    """alpha of the paper: open questions of one lookup."""
    rpc_timeout_s: float = 3.0
    """Deadline of one call, seconds."""
    lookup_timeout_s: float = 30.0
    """Longest lookup, seconds; what was found by then is the result."""
    bootstrap_grace_s: float = 0.5
    """Seconds to wait for the other initial peers after the first has answered."""
    pause: Pause = Pause(first_s=5.0, longest_s=120.0)  # noqa: RUF009 (frozen)
    """Pause of a peer that does not answer. Two halves of a healed swarm ignore each other for the longest at most."""
    max_storage_bytes: int = 64 * 1024 * 1024
    """Most bytes of entries kept for others, and most that are remembered of what was read."""
    max_concurrent_operations: int = 16
    """Most lookups of one `store_many` or `get_many` at once."""
    holders_life_s: float = 60.0
    """Seconds for which the holders of a record are remembered before the node walks to them again."""
    refresh_period_s: float = 900.0
    """Seconds without a lookup after which a bucket that is not full is looked up."""
    rejoin_period_s: float = 60.0
    """Seconds between tries of the initial peers and of lost ones."""
    lonely_rejoin_period_s: float = 5.0
    """The same while the node knows nobody at all, seconds."""
    sweep_period_s: float = 10.0
    """Seconds between sweeps of ended entries."""
    check_after_s: float = 60.0
    """Seconds since a contact was seen after which it is pinged to make room for a newcomer."""

    def __post_init__(self) -> None:
        if not 1 <= self.bucket_size <= 32:  # 32 contacts with the longest host names take 10 KB of a 64 KiB header
            raise ValueError(f"bucket_size must be from 1 to 32, got {self.bucket_size}")
        if not 1 <= self.replicas <= self.bucket_size:
            raise ValueError(f"replicas must be from 1 to the bucket size, got {self.replicas}")
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
