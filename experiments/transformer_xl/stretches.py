"""A run in virtual time as a chain of *stretches*, each a simulation of its own.

A stretch begins and ends with nobody at work: between two the model can be evaluated and saved. Every run pauses at the
same steps, so one that was interrupted and resumed from such a pause repeats the one that was not, bit for bit.
Trainers keep their memory of the text across a pause; staleness begins at zero again and grows to its mean within as
many updates as there are trainers.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dmoe_jax.data.batches import SegmentStream
from dmoe_jax.trainer import StepRecord
from net.errors import NoQuorum
from net.rpc.faults import Fault, FaultPlan

_MAX_LOST_IN_A_ROW = 200
"""Steps lost one after the other, all trainers together, after which a run cannot be helped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The paper's: 32 trainers of batch 1, 1000 ms of mean delay, 10 % of the calls failing."""

    num_trainers: int = 32
    """Asynchronous trainers."""
    batch_size: int = 1
    """Sequences of each."""
    delay_s: float = 1.0
    """Mean of the exponential delay: of each expert call, and of each step of a dense model. Virtual seconds."""
    failure_rate: float = 0.1
    """Share of expert calls that are never answered."""
    num_nodes: int = 8
    """Hosts that share the experts."""
    grace_s: float = 5.0
    """How long a trainer waits for the other experts after the first has answered, virtual seconds: so long that hardly
    a call is lost but those that fail (1 in 150)."""
    timeout_s: float = 30.0
    """After which a call is given up, virtual seconds."""

    def __post_init__(self) -> None:
        if min(self.num_trainers, self.batch_size, self.num_nodes) < 1:
            raise ValueError(f"expected at least one trainer, row and node, got {self}")
        if not (self.delay_s >= 0 and 0 <= self.failure_rate < 1):
            raise ValueError(f"expected delay_s >= 0 and 0 <= failure_rate < 1, got {self}")

    def faults(self, seed: int) -> FaultPlan:
        """What happens to the expert calls."""
        rates = {Fault.LATE: 1 - self.failure_rate, Fault.HANG: self.failure_rate}
        return FaultPlan(rates=rates, late_mean_s=self.delay_s, methods=("expert.",), seed=seed)


@dataclass(slots=True)
class Counters:
    """Running totals of a simulated run."""

    tokens: int = 0
    staleness: int = 0
    steps_lost: int = 0
    virtual_s: float = 0.0


class Stretches:
    """What both engines share: streams, trainers' memories, counters, and the count to a stretch's last update."""

    def __init__(self, *, name: str, ids: np.ndarray, seq_len: int, setting: Setting, seed: int) -> None:
        self.name = name
        self.setting = setting
        self.seed = seed
        self.counters = Counters()
        self.streams = [
            SegmentStream(
                ids,
                batch_size=setting.batch_size,
                seq_len=seq_len,
                shard=index,
                num_shards=setting.num_trainers,
                seed=seed,
            )
            for index in range(setting.num_trainers)
        ]
        self._lost_in_a_row = 0

    def seed_of(self, step: int) -> int:
        """Seed of the stretch that begins at this step."""
        return int(np.random.SeedSequence([self.seed, step]).generate_state(1)[0])

    def took(self, record: StepRecord) -> None:
        """A trainer made a step."""
        self._lost_in_a_row = 0
        self.counters.tokens += record.items
        self.counters.staleness += record.staleness

    def lost(self, trainer: int, error: Exception) -> None:
        """A trainer lost a step.

        Raises:
          NoQuorum: so many were lost in a row that nothing will come of it.
        """
        self.counters.steps_lost += 1
        self._lost_in_a_row += 1
        if self._lost_in_a_row > _MAX_LOST_IN_A_ROW:
            raise NoQuorum(
                f"{self.name}: {self._lost_in_a_row} steps lost in a row, the last one by trainer {trainer}: {error}"
            ) from error

    def facts(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        return {"positions": [stream.position for stream in self.streams], "counters": asdict(self.counters)}

    def load(self, facts: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        for stream, position in zip(self.streams, facts["positions"], strict=True):
            stream.seek(position)
        self.counters = Counters(**facts["counters"])
