"""Routers that are told apart: all pairs at equal seeds, the order of the means, and both in sentences.

So many pairs tempt chance: what is told apart is so by p-values that are corrected for their number (Holm).
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dmoe_jax.runs.report import ReportTable, format_value
from experiments.intervals import Interval, holm, paired_difference, t_interval

Perplexities = Mapping[str, Mapping[int, float]]
"""Router -> seed -> final validation perplexity."""

_LEVEL = 0.05
"""Greatest probability that any pair of like routers is told apart."""


class Pair(NamedTuple):
    """Two routers.

    Attributes:
      lower, higher: by the order of their means.
      above: by how much the second is above the first, paired by seed.
      p_value: of the difference, corrected for the number of pairs.
    """

    lower: str
    higher: str
    above: Interval
    p_value: float

    @property
    def is_told_apart(self) -> bool:
        """True if the corrected p-value is at most 0.05."""
        return self.p_value <= _LEVEL


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
    all_ = [(*pair, paired_difference(perplexities[pair[1]], perplexities[pair[0]])) for pair in pairs]
    found = [(lower, higher, above) for lower, higher, above in all_ if above is not None]
    corrected = holm([above.p_value for _, _, above in found])
    return [Pair(*pair, p_value) for pair, p_value in zip(found, corrected, strict=True)]


def pairs_headline(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {"lower": pair.lower, "higher": pair.higher, "difference": above.mean, "interval": above.ends}
        | {"seeds": above.num_values, "p_value": pair.p_value, "told_apart": pair.is_told_apart}
        for pair in pairs
        for above in [pair.above]
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
            above_first[pair.higher] = str(pair.above)
    rows: list[list[object]] = []
    for label, place in places.items():
        told = ", ".join(map(str, sorted(apart[label]))) or "none"
        seeds = [*perplexities[label].values()]
        rows.append([place, label, len(seeds), str(t_interval(seeds)), above_first.get(label), told])
    head = ("", "router", "seeds", "validation perplexity", "above the first", "told apart from")
    note = (
        "In the order of the means over the seeds that all have. In brackets 95 % intervals; those of differences are "
        "over pairs at equal seeds, which share text, delays and failures. Two routers are told apart where the "
        "p-value of their difference, corrected for the number of pairs (Holm), is at most 0.05."
    )
    return ReportTable(title="In order", head=head, rows=rows, note=note)


def sentences(perplexities: Perplexities, pairs: Sequence[Pair]) -> list[str]:
    """Return the result in two sentences: the order, and how many pairs are told apart; if none is, this first."""
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
        return ["No router is told apart from another: that takes two seeds.", ranked]
    by = f"by {min(counts)} seeds, corrected for the number of pairs (Holm)."
    apart = sum(pair.is_told_apart for pair in pairs)
    if not apart:
        return [f"No router is told apart from another {by}", ranked]
    return [ranked, f"{apart} of {len(counts)} pairs are told apart {by}"]
