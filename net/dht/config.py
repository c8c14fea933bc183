"""Settings of a DHT node."""

from dataclasses import dataclass, field

from net.dht.lookup import LookupConfig
from net.peer_health import Pause


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtConfig:
    """Settings of a DHT node. Periods are jittered by +-25 % so that nodes started together do not act together."""

    bucket_size: int = 20
    """k of the paper: contacts a bucket, and contacts an answer."""
    depth_modulo: int = 5
    """b of the paper, section 4.2: buckets away from the own id split down to multiples of this depth."""
    replicas: int = 5
    """Peers that keep each record."""
    lookup: LookupConfig = field(default_factory=LookupConfig)
    """Parameters of the iterative lookup."""
    rpc_timeout_s: float = 3.0
    """Deadline of one call, seconds."""
    lookup_timeout_s: float = 30.0
    """Longest lookup, seconds; what was found by then is the result."""
    bootstrap_grace_s: float = 0.5
    """How long to wait for the other initial peers after the first has answered, seconds."""
    pause: Pause = Pause(first_s=5.0, longest_s=120.0)  # noqa: RUF009 (frozen)
    """How long a peer that does not answer is left alone. The longest also bounds how long two halves of a healed swarm
    can ignore each other."""
    max_lifetime_s: float = 300.0
    """Latest expiration of a record: now plus this, seconds. Later ones are brought down to it: a living peer
    renews its records, and records of a dead one must not stand in the way of others."""
    max_keys: int = 65_536
    """Most records kept for others."""
    max_storage_bytes: int = 64 * 1024 * 1024
    """Most encoded bytes kept for others."""
    max_concurrent_operations: int = 16
    """Most lookups of one `store_many` or `get_many` at once."""
    refresh_period_s: float = 300.0
    """A bucket that no lookup went to for so long is looked up, seconds."""
    rejoin_period_s: float = 60.0
    """How often peers that got lost, and the initial peers, are tried again, seconds."""
    lonely_rejoin_period_s: float = 5.0
    """The same while the node knows nobody at all, seconds."""
    sweep_period_s: float = 10.0
    """How often ended records are dropped, seconds."""
    check_after_s: float = 60.0
    """A contact seen so recently is not pinged to make room for a newcomer, seconds."""

    def __post_init__(self) -> None:
        if not 1 <= self.bucket_size <= 32:  # 32 contacts with the longest host names take 10 KB of a 64 KiB header
            raise ValueError(f"bucket_size must be from 1 to 32, got {self.bucket_size}")
        if not 1 <= self.replicas <= self.lookup.beam_size:
            raise ValueError(f"replicas must be from 1 to the beam size, got {self.replicas}")
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
