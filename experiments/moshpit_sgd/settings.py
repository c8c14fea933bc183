"""Settings of this experiment's command line."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from experiments.bench import Settings
from experiments.moshpit_sgd.time_model import TimeModel

ModelName = Literal["mnist", "transformer_xl"]
MethodName = Literal["all_reduce", "pushsum", "moshpit"]


@dataclass(frozen=True, kw_only=True)
class MoshpitSgdSettings(Settings):
    """Time to a target loss, in virtual time, of peers of unequal speed that come and go."""

    quick: bool = False
    """The MNIST network and 16 peers only."""
    model: ModelName | None = None
    """Model that is trained. Default: one after the other; with --quick the MNIST network."""
    peers: int | None = None
    """Number of peers that train. Default: 16, then 64; with --quick 16."""
    clock: Annotated[TimeModel, tyro.conf.OmitArgPrefixes] = field(default_factory=TimeModel)
    """Durations in the simulated swarm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(2, "peers")

    @property
    def models(self) -> tuple[ModelName, ...]:
        """Models that are trained, in order."""
        if self.model is not None:
            return (self.model,)
        return ("mnist",) if self.quick else ("mnist", "transformer_xl")

    @property
    def swarms(self) -> tuple[int, ...]:
        """Numbers of peers, in order."""
        if self.peers is not None:
            return (self.peers,)
        return (16,) if self.quick else (16, 64)
