"""Settings of this experiment's command line."""

from dataclasses import dataclass
from typing import Literal, get_args

from experiments.bench import Settings

# Those that measure memory come first: a process keeps what it once took.
Part = Literal[
    "memory", "joins", "cold", "trainer", "announcing", "churn", "vanish", "clocks", "partition", "bootstraps"
]


@dataclass(frozen=True, kw_only=True)
class DhtScaleSettings(Settings):
    """Measure how experts are found in large swarms: times, calls and bytes, under churn and faults."""

    quick: bool = False
    """Swarms of at most a thousand nodes, one seed; under ten minutes on one core."""
    parts: tuple[Part, ...] = get_args(Part)
    """Parts to measure."""
