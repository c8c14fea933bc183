"""Settings of this experiment's command line."""

from dataclasses import dataclass

from experiments.bench import Settings
from experiments.moshpit_averaging.paper import SQUARE, TABLE, Setting


@dataclass(frozen=True, kw_only=True)
class AveragingSettings(Settings):
    """Count the rounds that averaging takes among peers that may be absent, in each row of the paper's table."""

    quick: bool = False
    """Only the rows of 512 and 1024 peers on the square whose groups exclude absent peers; 10 restarts."""

    @property
    def restarts(self) -> int:
        """Independent repetitions of each row, the mean over which is reported. The paper has 10."""
        return 10 if self.quick else 100

    @property
    def rows(self) -> tuple[Setting, ...]:
        """Settings that are simulated, in order."""
        if not self.quick:
            return TABLE
        square = (row for row in TABLE if row.grid == SQUARE and row.failure_rule == "exclude")
        return tuple(row for row in square if row.num_peers in (512, 1024))
