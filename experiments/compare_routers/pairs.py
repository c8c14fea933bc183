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
      difference: of the perplexities, lower - higher, paired by seed.
    """

    lower: str
    higher: str
    difference: Interval

    @property
    def is_told_apart(self) -> bool:
        """True if the 95 % interval of the difference leaves out 0."""
        return self.difference.is_below_zero or self.difference.is_above_zero


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
    found = []
    for lower, higher in itertools.combinations(means(perplexities), 2):
        difference = paired_difference(perplexities[lower], perplexities[higher])
        if difference is not None:
            found.append(Pair(lower, higher, difference))
    return found


def pairs_headline(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "lower": pair.lower,
            "higher": pair.higher,
            "difference": pair.difference.mean,
            "interval": pair.difference.ends,
            "seeds": pair.difference.num_values,
            "told_apart": pair.is_told_apart,
        }
        for pair in pairs
    ]


def ranking_table(perplexities: Perplexities, pairs: Sequence[Pair], title: str) -> ReportTable:
    """The routers by their means, and from which others each is told apart."""
    order = means(perplexities)
    places = {label: place for place, label in enumerate(order, start=1)}
    apart: dict[str, list[int]] = {label: [] for label in order}
    to_best = {}
    for pair in pairs:
        if pair.is_told_apart:
            apart[pair.lower].append(places[pair.higher])
            apart[pair.higher].append(places[pair.lower])
        if places[pair.lower] == 1:
            to_best[pair.higher] = pair.difference
    rows: list[list[object]] = []
    for label, place in places.items():
        behind = with_interval(_negative(to_best[label])) if label in to_best else None
        told = ", ".join(map(str, sorted(apart[label]))) or "none"
        seeds = [*perplexities[label].values()]
        rows.append([place, label, len(seeds), with_interval(t_interval(seeds)), behind, told])
    head = ("", "router", "seeds", "validation perplexity", "above the first", "told apart from")
    note = (
        "In the order of the means over the seeds that all have. In brackets 95 % intervals; those of differences are "
        "over pairs at equal seeds, which share text, delays and failures, and are the ones to go by: two routers are "
        "told apart where that of their difference leaves out 0."
    )
    return ReportTable(title=title, head=head, rows=rows, note=note)


def pairs_table(pairs: Sequence[Pair], title: str) -> ReportTable:
    """Every pair."""
    rows: list[list[object]] = [
        [pair.lower, pair.higher, with_interval(pair.difference), "yes" if pair.is_told_apart else "no"]
        for pair in pairs
    ]
    head = ("lower", "higher", "difference", "told apart")
    return ReportTable(title=title, head=head, rows=rows, note="Of validation perplexities, paired by seed.")


def with_interval(interval: Interval) -> str:
    """A mean with its interval, if it has one."""
    ends = "" if interval.ends is None else " ({} to {})".format(*map(format_value, interval.ends))
    return format_value(interval.mean) + ends


def _negative(interval: Interval) -> Interval:
    """The interval of the negative values."""
    low, high = (None, None) if interval.ends is None else (-interval.ends[1], -interval.ends[0])
    return Interval(-interval.mean, low, high, interval.num_values)


def sentences(perplexities: Perplexities, entropies: Mapping[str, float | None]) -> list[str]:
    """Return the result in three sentences: the order, who is told apart, and what balance has to do with it.

    Args:
      entropies: router -> entropy of its load at the end, 1 if even.
    """
    order, pairs = means(perplexities), all_pairs(perplexities)
    if len(order) < 2:
        return []
    (first, least), (last, most) = next(iter(order.items())), list(order.items())[-1]
    found = [
        f"{first} has the lowest mean validation perplexity, {format_value(least)}, and {last} the highest, "
        f"{format_value(most)}, {100 * (most / least - 1):.2g} % more."
    ]
    return [*found, _told_apart(pairs), _of_balance(list(order), entropies)]


def _told_apart(pairs: Sequence[Pair]) -> str:
    with_spread = [pair for pair in pairs if pair.difference.ends is not None]
    if not with_spread:
        return "With one seed of each no two of them are told apart, whatever their means are."
    apart = [pair for pair in with_spread if pair.is_told_apart]
    chance = _BY_CHANCE * len(with_spread)
    seeds = min(pair.difference.num_values for pair in with_spread)
    if not apart:
        widest = max(pair.difference.mean - (pair.difference.low or 0.0) for pair in with_spread)
        return (
            f"None of {len(with_spread)} pairs is told apart by {seeds} seeds: the intervals of the differences reach "
            f"up to {format_value(widest)} to either side."
        )
    # Whose interval keeps away from 0 most.
    clearest = max(apart, key=lambda pair: -(pair.difference.high or 0.0))
    return (
        f"Of {len(with_spread)} pairs {len(apart)} are told apart by {seeds} seeds, where about {chance:.2g} would be "
        f"by chance if all routers were alike; the clearest: {clearest.lower} ends below {clearest.higher} by "
        f"{with_interval(_negative(clearest.difference))}."
    )


def _of_balance(order: Sequence[str], entropies: Mapping[str, float | None]) -> str:
    known = {label: entropy for label in order if (entropy := entropies.get(label)) is not None}
    if len(known) < 2:
        return "How even their loads are was not measured."
    even, uneven = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
    return (
        f"The load is most even with {even} (entropy {known[even]:.2f}; {order.index(even) + 1} of {len(order)} by "
        f"perplexity) and least with {uneven} ({known[uneven]:.2f}; {order.index(uneven) + 1} of {len(order)})."
    )
