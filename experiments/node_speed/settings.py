"""The command line, and the experts and callers of each part. Nothing here imports JAX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.bench import Settings

Part = Literal["calls", "memory", "demonstration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Experts on one node, and the callers that keep it busy."""

    name: str
    """In the names of slices and figures."""
    experts: int
    """Experts on the node."""
    d_model: int
    """Their width; each has about 8 d_model^2 parameters."""
    rows: int
    """Rows of a request to one expert; with `is_mixed` the most."""
    callers: int
    """Callers at once, each with one layer call under way."""
    at_once: int = 1
    """Experts that a layer call goes to, each with all of its rows."""
    max_batch_rows: int = 256
    """As of `NodeConfig`. All sizes up to it are compiled before the node serves."""
    is_mixed: bool = False
    """True if each layer call draws its number of rows, from 1 to `rows`, small ones as often as large ones."""


SINGLE_ROWS = Case(name="single_rows", experts=16, d_model=256, rows=1, callers=64)
"""Beside bare calls, and beside a node that joins no requests."""
CASES = (
    Case(name="large_requests", experts=16, d_model=256, rows=64, callers=16),
    Case(name="many_experts", experts=64, d_model=64, rows=32, callers=4, at_once=8),
    SINGLE_ROWS,
    Case(name="wide_expert", experts=1, d_model=1024, rows=1, callers=8),
)
"""Beside bare calls, the last one not, and beside hivemind."""
MIXED_LOADS = (
    Case(name="memory_many_experts", experts=64, d_model=64, rows=256, callers=4, is_mixed=True),
    Case(name="memory_wide_experts", experts=4, d_model=1024, rows=256, callers=4, is_mixed=True),
)
"""Nodes whose memory and compilations are looked at while they serve batches of all sizes."""


@dataclass(frozen=True, kw_only=True)
class SpeedSettings(Settings):
    """Measure an expert node against bare jitted calls of the same programs, and against hivemind, in one run."""

    quick: bool = False
    """Three rounds of one second a side and not of three, ten seconds of mixed load and not ten minutes, swarms of 120
    updates and not 400: about a quarter of an hour, most of it for the demonstration."""
    parts: tuple[Part, ...] = ("calls", "memory", "demonstration")
    """Measured parts. calls: a node beside bare calls, and beside hivemind. memory: under a load of mixed batch sizes,
    with compilations. demonstration: steps a second of its trainers beside those of the same model in one jitted
    program."""
    seed: int = 0
    """Seed of inputs, gradients and who asks which expert."""
    rounds: int | None = None
    """Rounds that count; one more comes before them to warm up. Default: 9; 3 with --quick and in the demonstration."""
    hivemind: Path | None = None
    """Python interpreter that has hivemind and torch. Default: .hv/bin/python, if it is there; without one the figures
    beside hivemind are null."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "rounds")
        if not self.parts:
            raise ValueError("--parts needs one at least")
