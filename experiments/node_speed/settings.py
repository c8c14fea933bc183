"""The command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.bench import Settings
from experiments.node_speed.cases import Case, width_of

_QUICK_ROUNDS, _QUICK_SLICE_S, _QUICK_LOAD_S, _QUICK_LARGE_MB, _QUICK_STEPS = 3, 1.0, 10.0, 32.0, 120
_ROUNDS, _SLICE_S, _LOAD_S, _LARGE_MB, _STEPS = 9, 3.0, 300.0, 400.0, 400
_DEMO_ROUNDS = 3

Part = Literal["calls", "memory", "saving", "strategies", "demonstration"]
PARTS: tuple[Part, ...] = ("calls", "memory", "saving", "strategies", "demonstration")


@dataclass(frozen=True, kw_only=True)
class SpeedSettings(Settings):
    """Measure an expert node against bare jitted calls of the same programs, and against hivemind, in one run."""

    quick: bool = False
    """Three rounds of one second a side, ten seconds of mixed load, a small "large" expert, swarms of 120 updates;
    about a quarter of an hour, most of it for the demonstration."""
    parts: tuple[Part, ...] = PARTS
    """Measured parts. calls: a node beside bare calls, and beside hivemind. memory: under a load of mixed batch sizes,
    with compilations. saving: who waits while an expert is saved. strategies: experts by programs of their own beside
    stacked ones. demonstration: steps a second of its trainers beside those of the same model in one jitted program."""
    seed: int = 0
    """Seed of inputs, gradients and who asks which expert."""
    rounds: int | None = None
    """Rounds that count; one more comes before them to warm up. Default: 9, or 3 with --quick."""
    slice_s: float | None = None
    """Duration of each measurement of a round, seconds. Default: 3, or 1 with --quick."""
    processes: int = 2
    """Processes that the callers share."""
    at_once: int = 1
    """Experts that a caller asks at once, where a node has 16 of them."""
    many_at_once: int = 8
    """Experts that a caller asks at once, where a node has 64 of them."""
    hivemind: Path | None = None
    """Python interpreter that has hivemind and torch. Default: .hv/bin/python, if it is there; without one the figures
    beside hivemind are null."""
    load_s: float | None = None
    """Duration of the load of mixed batch sizes, seconds. Default: 300, or 10 with --quick."""
    large_mb: float | None = None
    """Parameters of the expert that is saved while it is served, MB. Default: 400, or 32 with --quick."""
    widths: tuple[int, ...] = (64, 256)
    """Widths of the experts whose strategies are compared."""
    demo_rounds: int = _DEMO_ROUNDS
    """Rounds of the demonstration, and one more before them."""
    demo_steps: int | None = None
    """Updates that each of its swarms makes; the second half counts. Default: 400, or 120 with --quick."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "rounds", "processes", "at_once", "many_at_once", "demo_rounds")
        self.require_at_least(10, "demo_steps")
        self.require_above(0, "slice_s", "load_s", "large_mb")
        if not self.parts:
            raise ValueError("--parts needs one at least")
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"--widths must be 1 at least, got {' '.join(map(str, self.widths)) or 'none'}")
        for name, most in (("at_once", 16), ("many_at_once", 64)):
            if getattr(self, name) > most:
                raise ValueError(f"--{name.replace('_', '-')} must be at most {most}, got {getattr(self, name)}")

    @property
    def chosen_rounds(self) -> int:
        """The rounds that are meant."""
        return self.rounds or (_QUICK_ROUNDS if self.quick else _ROUNDS)

    @property
    def chosen_slice_s(self) -> float:
        """The duration of a slice that is meant, seconds."""
        return self.slice_s or (_QUICK_SLICE_S if self.quick else _SLICE_S)

    @property
    def chosen_load_s(self) -> float:
        """The duration of the mixed load that is meant, seconds."""
        return self.load_s or (_QUICK_LOAD_S if self.quick else _LOAD_S)

    @property
    def chosen_demo_steps(self) -> int:
        """The updates of each swarm that are meant."""
        return self.demo_steps or (_QUICK_STEPS if self.quick else _STEPS)

    @property
    def large_requests(self) -> Case:
        """16 experts of width 256, 64 rows a request, 16 callers."""
        return Case(name="large_requests", experts=16, d_model=256, rows=64, callers=16, at_once=self.at_once)

    @property
    def many_experts(self) -> Case:
        """64 experts of width 64, 32 rows a request, 4 callers."""
        return Case(name="many_experts", experts=64, d_model=64, rows=32, callers=4, at_once=self.many_at_once)

    @property
    def single_rows(self) -> Case:
        """16 experts of width 256, one row a request, 64 callers."""
        return Case(name="single_rows", experts=16, d_model=256, rows=1, callers=64, at_once=self.at_once)

    @property
    def wide_expert(self) -> Case:
        """One expert of width 1024, one row a request, 8 callers: what hivemind is compared with only."""
        return Case(name="wide_expert", experts=1, d_model=1024, rows=1, callers=8)

    @property
    def mixed_loads(self) -> tuple[Case, ...]:
        """Nodes whose memory and compilations are looked at while they serve batches of all sizes."""
        few = Case(name="memory_many_experts", experts=64, d_model=64, rows=256, callers=4, is_mixed=True)
        wide = Case(name="memory_wide_experts", experts=4, d_model=1024, rows=256, callers=4, is_mixed=True)
        return few, wide

    @property
    def large_expert(self) -> Case:
        """One large expert, 16 rows a request, one caller: who waits while it is saved, and how long."""
        chosen = self.large_mb or (_QUICK_LARGE_MB if self.quick else _LARGE_MB)
        return Case(name="large_expert", experts=1, d_model=width_of(chosen), rows=16, callers=1, max_batch_rows=16)
