"""What the paper has (Ryabinin et al., NeurIPS 2021), and how this experiment's records are called and sorted."""

from collections.abc import Mapping, Sequence
from typing import Any

PAPER_RESNET, PAPER_ALBERT = 1.3, 1.5
"""SGP over Moshpit for ResNet-50, All-Reduce over Moshpit for ALBERT."""

TITLES = {"all_reduce": "All-Reduce", "gossip": "gossip", "pushsum": "PushSum (SGP)", "moshpit": "Moshpit"}
"""What readers call the methods."""

Record = Mapping[str, Any]
"""A line of metrics.jsonl: an evaluation, or the result of one method."""


def by_swarm(records: Sequence[Record]) -> dict[tuple[str, int], dict[str, Record]]:
    """The last record of each method, by (model, peers) and then by method."""
    swarms: dict[tuple[str, int], dict[str, Record]] = {}
    for record in records:
        swarms.setdefault((record["model"], record["peers"]), {})[record["method"]] = record
    return swarms
