"""Settings of a remote mixture. Nothing here imports JAX: `dmoe --help` reads them."""

from dataclasses import dataclass

from dmoe_jax.mixture.expert_calls import MAX_PARTS
from dmoe_net.wire.compression import Compression


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """Settings by which a mixture chooses its experts, speaks with them, and waits for them. Raises ValueError if one
    is out of range."""

    prefix: str = ""
    """Experts are `prefix.i.j`; one prefix a layer."""
    k_best: int = 4
    """Experts asked for each sample."""
    k_min: int = 1
    """Answers that each sample needs."""
    grace_s: float = 1.0
    """Seconds to wait for stragglers once every sample has `k_min` answers. Infinity waits for all."""
    timeout_s: float = 10.0
    """Seconds after which a call is given up."""
    max_rows: int = 256
    """Most samples of one call: an expert with more of them gets several calls, each of which updates it. At most the
    nodes' `max_batch_rows`, which they refuse to exceed."""
    max_parts: int = MAX_PARTS
    """Most experts of a node that are asked by one request. With 1 each expert is asked by a request of its own, and
    faults that strike requests strike experts one by one."""
    compression: Compression = Compression.NONE
    """Form, or its name, of float32 activations and gradients on their way, there and back, with the losses that
    `dmoe_net.wire.compression` states; those of other types travel as they are."""
    on_shortfall: str = "skip"
    """Fate of a sample with fewer than `k_min` answers: "skip" mixes what there is (with nothing, the sample passes
    unchanged), "raise" gives the step up with `NoQuorum`."""
    max_skipped: float = 1.0
    """Largest share of samples without any expert, over the layer's last 32 calls; a call raises `TooFewExperts` once
    it has been larger for ten seconds on end. 0: a call raises at once. 1: never, the layer only warns."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "compression", Compression(self.compression))  # which may be given by its name
        if self.k_best < 1:
            raise ValueError(f"k_best must be at least 1, got {self.k_best}")
        if self.k_min < 0:
            raise ValueError(f"k_min must be at least 0, got {self.k_min}")
        if self.k_min > self.k_best:
            raise ValueError(f"k_min must not exceed k_best, got {self.k_min} and {self.k_best}")
        if self.max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {self.max_rows}")
        if not 1 <= self.max_parts <= MAX_PARTS:
            raise ValueError(f"max_parts must be from 1 to {MAX_PARTS}, got {self.max_parts}")
        if not self.grace_s >= 0:
            raise ValueError(f"grace_s must be at least 0, got {self.grace_s}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")
        if self.on_shortfall not in ("skip", "raise"):
            raise ValueError(f"on_shortfall is 'skip' or 'raise', got {self.on_shortfall!r}")
        if not 0 <= self.max_skipped <= 1:
            raise ValueError(f"max_skipped is a share from 0 to 1, got {self.max_skipped}")
