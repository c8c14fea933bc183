"""Where a peer is: the steps behind it, and the batch that it gathers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import trio

from dmoe_jax.collaboration.settings import CollaborationTotals
from net.averaging.collaboration.rounds import Averaged


@dataclass(slots=True, eq=False)
class UnderWay:
    """An averaging, perhaps beside the next batch."""

    own_samples: float
    """Of this peer, in it."""
    stopped_at: float
    """When this peer had ended its last micro-batch for it; trio's clock."""
    averaged: Averaged | None = None
    """What came of it; None if nothing did."""
    done: trio.Event = field(default_factory=trio.Event)
    """Set when it is over."""


@dataclass(slots=True, kw_only=True, eq=False)
class Standing:
    """What all parts of a collaboration know of this peer; each changes what it is about."""

    chain: bytes
    """Names the steps that led here: peers with the same have the same parameters."""
    step: int = 0
    """Global steps of the swarm that this peer has made or taken over."""
    trained: float = 0.0
    """Samples in all steps so far, of all peers."""
    gathered: float = 0.0
    """Samples that this peer has gathered for the step to come."""
    under_way: UnderWay | None = None
    """With delayed updates: the averaging beside this batch."""
    last_step_at: float = field(default_factory=trio.current_time)
    """When the last step was made or taken over."""
    totals: CollaborationTotals = field(default_factory=CollaborationTotals)
    """What has become of this peer's work."""

    @property
    def where(self) -> tuple[int, bytes] | None:
        """Step and chain of the batch that is gathered; None until it is known what became of the one before."""
        if self.under_way is not None and not self.under_way.done.is_set():
            return None
        return self.step, self.chain

    def moved(self, step: int, chain: bytes, trained: float) -> None:
        """This peer stands elsewhere now, with nothing gathered there."""
        self.step, self.chain, self.trained = step, chain, trained
        self.gathered, self.under_way = 0.0, None
        self.last_step_at = trio.current_time()

    def saved(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        return {"chain": self.chain.hex(), "samples_trained": self.trained}

    def restore(self, step: int, saved: Mapping[str, Any]) -> None:
        """Go on from a step and what was `saved` of it."""
        self.moved(step, bytes.fromhex(saved["chain"]), float(saved["samples_trained"]))
