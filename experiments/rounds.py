"""Measurements that take turns, round after round, and the ratios of two of them in the same round.

Ratios within a round hold on a machine whose speed drifts; the headline is their median over the rounds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from experiments.bench import Run, S
from experiments.results import Bar

SLICE = "slice"
"""Kind of the records: one uninterrupted measurement, with its "round", its "name" and its quantities."""

Record = Mapping[str, Any]
Measurement = Callable[[], Mapping[str, Record]]
"""Measures once; returns the quantities of each slice by its name."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A quantity of one slice over that of another one of the same round; its median over the rounds has a bar."""

    name: str
    """In the headline."""
    quantity: str
    """Key of the slices' records that is divided."""
    ours: str
    """Name of the slice above, as the next is of that below."""
    baseline: str
    comparison: Literal["<=", ">="]
    bound: float

    @property
    def bar(self) -> Bar:
        """Bar that the ratio must reach in the headline."""
        return Bar(name=self.name, bound=self.bound, comparison=self.comparison)

    def of_rounds(self, slices: Iterable[Record]) -> list[float]:
        """Compute the ratio of each round that has both slices, in order; round 0 warms up and does not count.

        A round whose baseline is 0, because nothing ended in its slice, has no ratio.
        """
        values = {(record["round"], record["name"]): record.get(self.quantity) for record in slices}
        pairs = [
            (values.get((number, self.ours)), values.get((number, self.baseline)))
            for number in sorted({number for number, _ in values if number > 0})
        ]
        return [ours / baseline for ours, baseline in pairs if ours is not None and baseline]


def measure_rounds(run: Run[S], measurements: Sequence[Measurement], ratios: Sequence[Ratio], *, rounds: int) -> None:
    """Measure all in turn, so many rounds and one before them that warms up, and log a record for each slice."""
    for number in range(rounds + 1):
        done: list[Record] = []
        # Every other round backwards: whatever drifts does not always favour the same side.
        for measure in measurements if number % 2 == 0 else reversed(measurements):
            for name, quantities in measure().items():
                done.append({"round": number, "name": name, **quantities})
                run.log(SLICE, **done[-1])
        found = {ratio.name.removesuffix("_ratio").replace("_", " "): ratio.of_rounds(done) for ratio in ratios}
        texts = [f"{name} {values[0]:.2f}" for name, values in found.items() if values]
        run.say(f"round {number}/{rounds}: {', '.join(texts) or 'warm-up'}")


def round_figures(
    slices: Sequence[Record], ratios: Sequence[Ratio], quantities: Sequence[str]
) -> dict[str, float] | None:
    """The headline: number of rounds that have all ratios (None for none), of each ratio the median of its rounds, the
    least and the greatest, and by "slice_quantity" the medians of what the ratios are made of."""
    of_rounds = {ratio.name: ratio.of_rounds(slices) for ratio in ratios}
    figures: dict[str, float] = {"rounds": min(map(len, of_rounds.values()))}
    if not figures["rounds"]:
        return None
    for name, values in of_rounds.items():
        figures |= {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    by_name: dict[str, list[float]] = {}
    for record in slices:
        for quantity in quantities:
            if record["round"] > 0 and quantity in record:
                by_name.setdefault(f"{record['name']}_{quantity}", []).append(record[quantity])
    return figures | {name: median(values) for name, values in by_name.items()}
