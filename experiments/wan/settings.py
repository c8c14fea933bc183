"""Settings of this experiment's command line, and the lines that it measures."""

from dataclasses import dataclass
from typing import Literal

from experiments.bench import Settings

Part = Literal["allreduce", "state", "churn", "kill", "tokens", "loop"]

IN_VIRTUAL_TIME: tuple[Part, ...] = ("allreduce", "state", "churn", "kill", "tokens")
"""Parts that are measured unless others are named: `loop` measures this machine, which must have nothing else to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Line between every two hosts."""

    gbps: float
    """Bandwidth of each host, in each direction, Gb/s."""
    round_trip_ms: float
    """Between every two hosts."""

    @property
    def name(self) -> str:
        """As it stands in the names of figures, such as `10g_100ms`."""
        speed = f"{self.gbps:g}g" if self.gbps >= 1 else f"{1000 * self.gbps:g}m"
        return f"{speed}_{self.round_trip_ms:g}ms"


GIGABIT, TEN_GIGABIT = Line(gbps=1.0, round_trip_ms=100.0), Line(gbps=10.0, round_trip_ms=100.0)
QUICK_LINES = (GIGABIT, TEN_GIGABIT)
"""Those with a bar."""
LINES = tuple(Line(gbps=gbps, round_trip_ms=ms) for gbps in (0.1, 1.0, 10.0) for ms in (10.0, 50.0, 100.0, 200.0))


@dataclass(frozen=True, kw_only=True)
class WanSettings(Settings):
    """Measure what averaging and state downloads use of a wide-area line, and what failures and traffic cost there."""

    quick: bool = False
    """Only the lines that have a bar; churn with one seed and for four minutes; fewer kills; two sizes of models."""
    parts: tuple[Part, ...] = IN_VIRTUAL_TIME
    """Parts to measure. allreduce, state: shares of the line. churn: samples that are in a step, against failures a
    minute. kill: from a kill in the middle of an averaging to the next step. tokens: bytes for each token. All these in
    virtual time. loop: what averaging in the background costs a trainer on this machine."""
    peers: int = 4
    """Members of a group."""
    mib: int = 256
    """Length of the vector, MiB of float32."""
    rounds: int = 4
    """All-reduces that count on each line, after the first two, in which windows and connections grow."""
    state_mib: int = 1024
    """Length of the state that one donor gives, MiB."""
    donors: int = 4
    """Donors at once, with a quarter of the newcomer's bandwidth each."""
    budget_mib: int = 512
    """Memory budget of each peer in `allreduce` and `state`, MiB."""
    seeds: int = 3
    """Seeds of `churn`, from --seed on; with --quick one."""
    minutes: float = 5.0
    """Virtual minutes of `churn`, at each rate with each seed; with --quick at most four."""
    loop_params: int = 2**22
    """Parameters of the model of `loop`, about."""
    loop_s: float = 30.0
    """Seconds of each turn of `loop`, at least."""
    loop_periods_s: tuple[float, ...] = (1.0, 5.0, 30.0)
    """Seconds between two averages of `loop`; with --quick at most the first two."""
    loop_turns: int = 8
    """Turns of `loop`, with and without averaging each, at every period; with --quick at most two."""
    kills: int = 6
    """Peers killed at each round trip of `kill`; with --quick at most three."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(
            1, "mib", "rounds", "state_mib", "budget_mib", "seeds", "kills", "loop_params", "loop_turns"
        )
        self.require_above(1, "minutes")
        self.require_above(0, "loop_s")
        if not self.loop_periods_s or min(self.loop_periods_s) <= 0:
            raise ValueError(f"--loop-periods-s needs numbers above 0, one at least; got {self.loop_periods_s}")
        if not 2 <= self.peers <= 64:
            raise ValueError(f"--peers must be 2 to 64, got {self.peers}")
        if not 2 <= self.donors <= 8:
            raise ValueError(f"--donors must be 2 to 8, got {self.donors}")
        if not self.parts:
            raise ValueError("--parts needs one at least")

    @property
    def chosen_lines(self) -> tuple[Line, ...]:
        """The lines that are meant."""
        return QUICK_LINES if self.quick else LINES

    @property
    def churn_seeds(self) -> range:
        """Seeds of `churn`."""
        return range(self.seed, self.seed + (1 if self.quick else self.seeds))

    @property
    def churn_minutes(self) -> float:
        """Virtual minutes of `churn`."""
        return min(self.minutes, 4.0) if self.quick else self.minutes

    @property
    def chosen_kills(self) -> int:
        """At each round trip of `kill`."""
        return min(self.kills, 3) if self.quick else self.kills

    @property
    def model_sizes(self) -> tuple[int, ...]:
        """Parameters of the models of `tokens`."""
        return (2**18, 2**20) if self.quick else (2**18, 2**20, 2**22)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Tokens of a step of the optimiser in `tokens`."""
        return (2**15,) if self.quick else (2**15, 2**17)

    @property
    def chosen_loop_periods_s(self) -> tuple[float, ...]:
        """Seconds between two averages of `loop`."""
        return self.loop_periods_s[: 2 if self.quick else None]

    @property
    def chosen_loop_turns(self) -> int:
        """Turns of `loop`, at each period."""
        return min(self.loop_turns, 2) if self.quick else self.loop_turns
