"""Routers that are told apart: all pairs at equal seeds, the order of the means, and both in sentences."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dmoe_jax.runs.report import ReportTable, format_value
from experiments.intervals import Interval, paired_difference, t_interval

Perplexities = Mapping[str, Mapping[int, float]]
"""Router -> seed -> final validation perplexity."""

_BY_CHANCE = 0.05
"""Share of the pairs of like routers that 95 % intervals tell apart all the same."""


class Pair(NamedTuple):
    """Two routers.

    Attributes:
      lower, higher: by the order of their means.
      above: by how much the second is above the first, paired by seed.
    """

    lower: str
    higher: str
    above: Interval

    @property
    def is_told_apart(self) -> bool:
        """True if the 95 % interval of the difference leaves out 0."""
        return self.above.is_below_zero or self.above.is_above_zero


def means(perplexities: Perplexities) -> dict[str, float]:
    """Router -> mean perplexity, ascending; over the seeds that all have, if there are any, since seeds differ."""
    known = {label: seeds for label, seeds in perplexities.items() if seeds}
    common = set.intersection(*(set(seeds) for seeds in known.values())) if known else set[int]()
    found = {
        label: t_interval([value for seed, value in seeds.items() if seed in common or not common]).mean
        for label, seeds in known.items()
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


def all_pairs(perplexities: Perplexities) -> list[Pair]:
    """Every two routers that share a seed, in the order of their means."""
    pairs = itertools.combinations(means(perplexities), 2)
    found = [(*pair, paired_difference(perplexities[pair[1]], perplexities[pair[0]])) for pair in pairs]
    return [Pair(lower, higher, above) for lower, higher, above in found if above is not None]


def pairs_headline(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "lower": pair.lower,
            "higher": pair.higher,
            "difference": pair.above.mean,
            "interval": pair.above.ends,
            "seeds": pair.above.num_values,
            "told_apart": pair.is_told_apart,
        }
        for pair in pairs
    ]


def ranking_table(perplexities: Perplexities, pairs: Sequence[Pair]) -> ReportTable:
    """The routers by their means, and from which others each is told apart."""
    places = {label: place for place, label in enumerate(means(perplexities), start=1)}
    apart: dict[str, list[int]] = {label: [] for label in places}
    above_first = {}
    for pair in pairs:
        if pair.is_told_apart:
            apart[pair.lower].append(places[pair.higher])
            apart[pair.higher].append(places[pair.lower])
        if places[pair.lower] == 1:
            above_first[pair.higher] = with_interval(pair.above)
    rows: list[list[object]] = []
    for label, place in places.items():
        told = ", ".join(map(str, sorted(apart[label]))) or "none"
        seeds = [*perplexities[label].values()]
        rows.append([place, label, len(seeds), with_interval(t_interval(seeds)), above_first.get(label), told])
    head = ("", "router", "seeds", "validation perplexity", "above the first", "told apart from")
    note = (
        "In the order of the means over the seeds that all have. In brackets 95 % intervals; those of differences are "
        "over pairs at equal seeds, which share text, delays and failures, and are the ones to go by: two routers are "
        "told apart where that of their difference leaves out 0."
    )
    return ReportTable(title="In order", head=head, rows=rows, note=note)


def with_interval(interval: Interval) -> str:
    """A mean with its interval, if it has one."""
    ends = "" if interval.ends is None else " ({} to {})".format(*map(format_value, interval.ends))
    return format_value(interval.mean) + ends


def sentences(perplexities: Perplexities, pairs: Sequence[Pair]) -> list[str]:
    """Return the result in two sentences: the order, and who is told apart, beside what chance alone would give."""
    order = list(means(perplexities).items())
    if len(order) < 2:
        return []
    (first, least), (last, most) = order[0], order[-1]
    ranked = (
        f"{first} has the lowest mean validation perplexity, {format_value(least)}, and {last} the highest, "
        f"{format_value(most)}, {100 * (most / least - 1):.2g} % more."
    )
    counts = [pair.above.num_values for pair in pairs if pair.above.ends is not None]
    if not counts:
        return [ranked, "With one seed of each no two of them are told apart, whatever their means are."]
    apart = sum(pair.is_told_apart for pair in pairs)
    return [
        ranked,
        f"Of {len(counts)} pairs {apart} are told apart by {min(counts)} seeds, where about "
        f"{_BY_CHANCE * len(counts):.2g} would be by chance if all routers were alike.",
    ]
