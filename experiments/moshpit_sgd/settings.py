"""Settings of this experiment's command line."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

import tyro

from experiments.bench import Settings
from experiments.moshpit_sgd.time_model import TimeModel

ModelName = Literal["mnist", "transformer_xl"]
MethodName = Literal["all_reduce", "gossip", "pushsum", "moshpit"]


@dataclass(frozen=True, kw_only=True)
class MoshpitSgdSettings(Settings):
    """Time to a target loss, in virtual time, of peers of unequal speed that come and go."""

    quick: bool = False
    """The MNIST network and 16 peers only."""
    model: ModelName | None = None
    """Model that is trained. Default: one after the other; with --quick the MNIST network."""
    peers: int | None = None
    """Number of peers that train. Default: 16, then 64; with --quick 16."""
    methods: tuple[MethodName, ...] = get_args(MethodName)
    """Methods by which they average."""
    local_steps: int = 4
    """Steps of a peer between two averagings."""
    target: float | None = None
    """Validation loss in nats that is to be reached. Default: the model's."""
    max_virtual_s: float = 1500.0
    """After which a method is given up."""
    evaluate_every_s: float = 10.0
    """Virtual seconds between two evaluations."""
    clock: Annotated[TimeModel, tyro.conf.OmitArgPrefixes] = field(default_factory=TimeModel)
    """Durations in the simulated swarm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "local_steps")
        self.require_at_least(2, "peers")
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ValueError(f"--methods must be different ones, got {' '.join(self.methods) or 'none'}")
        for name in ("max_virtual_s", "evaluate_every_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0 and finite, got {getattr(self, name)}")

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
