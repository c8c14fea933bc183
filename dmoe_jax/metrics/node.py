"""What an expert node counts, and how it is shown.

The node's queue and runner call a `NodeRecorder`; each call is a few additions, so that it is made whether anybody
looks or not.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dmoe_jax.metrics.families import (
    POWERS_OF_TWO,
    SECONDS,
    UPDATES,
    Family,
    Histogram,
    by_label,
    counter,
    gauge,
    histogram,
    labelled,
)
from net.errors import CallFailed, CallRefused, PeerBusy

KINDS = ("forward", "backward")


class NodeRecorder:
    """Counts of one node since its start; everything here only grows."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        """Calls of experts by kind and outcome: ok, busy, refused, failed, or given up by their caller."""
        self.batch_rows = {kind: Histogram(POWERS_OF_TWO) for kind in KINDS}
        """Rows of the batches that were computed."""
        self.queue_s = {kind: Histogram(SECONDS) for kind in KINDS}
        """Seconds from a request's arrival to the beginning of its batch."""
        self.device_s = {kind: Histogram(SECONDS) for kind in KINDS}
        """Seconds of a batch on the device."""
        self.staleness = Histogram(UPDATES)
        """Updates that an expert took between a backward request's forward and its own update."""
        self.rows: Counter[tuple[str, str]] = Counter()
        """Rows computed, by uid and kind. As many keys as the node has experts, twice."""
        self.malformed = 0
        """Requests that were refused because they do not fit."""

    def ended(self, kind: str, error: CallFailed | None = None) -> None:
        """A call was answered, with this error if it failed."""
        self.calls[kind, "ok" if error is None else _outcome_of(error)] += 1

    def given_up(self, kind: str) -> None:
        """Nobody waits for a call any more."""
        self.calls[kind, "given up"] += 1

    def does_not_fit(self, kind: str) -> None:
        """A call was refused when it was checked."""
        self.malformed += 1
        self.calls[kind, "refused"] += 1

    def batch(
        self,
        kind: str,
        uid: str,
        *,
        rows: Sequence[int],
        waited_s: Sequence[float],
        device_s: float,
        staleness: Sequence[int] = (),
    ) -> None:
        """A batch was computed.

        Args:
          kind: "forward" or "backward". uid: the expert.
          rows: of each request in it.
          waited_s: seconds that each of them waited for its turn.
          device_s: seconds of the batch on the device.
          staleness: of each request of a backward batch, updates.
        """
        total = sum(rows)
        self.batch_rows[kind].observe(total)
        self.device_s[kind].observe(device_s)
        self.rows[uid, kind] += total
        for seconds in waited_s:
            self.queue_s[kind].observe(seconds)
        for updates in staleness:
            self.staleness.observe(updates)


def node_families(recorder: NodeRecorder, status: Mapping[str, Any]) -> Iterator[Family]:
    """What a node did and does.

    Args:
      status: as of `ExpertNode.status`.
    """
    calls = (({"kind": kind, "outcome": outcome}, count) for (kind, outcome), count in sorted(recorder.calls.items()))
    yield labelled("counter", "dmoe_node_calls_total", "Calls for experts, by kind and outcome.", calls)
    refused = {"busy": status["busy"], "malformed": recorder.malformed}
    refused |= {f"{reason} not finite": count for reason, count in status["rejected"].items()}
    yield by_label("counter", "dmoe_node_refused_total", "Calls turned away, by reason.", "reason", refused)
    yield counter("dmoe_node_replayed_total", "Repeated requests answered from memory.", status["replayed"])
    for name, text, values in (
        ("dmoe_node_batch_rows", "Rows of a batch.", recorder.batch_rows),
        ("dmoe_node_queue_seconds", "Time that a request waited for its batch to begin.", recorder.queue_s),
        ("dmoe_node_device_seconds", "Time of a batch on the device.", recorder.device_s),
    ):
        yield by_label("histogram", name, text, "kind", values)
    text = "Time in which devices worked on batches; its rate is the number of them in use."
    yield counter("dmoe_node_device_busy_seconds_total", text, status["busy_s"])
    for name, text, key in (
        ("dmoe_node_each_device_busy_seconds_total", "Time in which each device worked on batches.", "busy_s"),
        ("dmoe_node_each_device_rows_total", "Rows that each device computed.", "rows"),
    ):
        yield by_label("counter", name, text, "device", {each["name"]: each[key] for each in status["devices"]})
    for name, text, key in (
        ("dmoe_node_each_device_waiting_rows", "Rows that wait for each device.", "waiting_rows"),
        ("dmoe_node_each_device_state_bytes", "Parameters and optimiser state on each device.", "nbytes"),
    ):
        yield by_label("gauge", name, text, "device", {each["name"]: each[key] for each in status["devices"]})
    text = "Updates of the expert between a request's forward and its update."
    yield histogram("dmoe_node_staleness_updates", text, recorder.staleness)
    yield gauge("dmoe_node_waiting_rows", "Rows that wait for the device.", status["waiting_rows"])
    yield gauge("dmoe_node_warm_rows", "Rows of a batch up to which programs are compiled.", status["warm_rows"])
    yield gauge("dmoe_node_experts", "Experts that the node serves.", len(status["updates"]))
    if "claims" in status:
        yield from _claim_families(status["claims"])
    serves = int(status["state"] == "serving")
    yield gauge("dmoe_node_serving", "1 while the node serves, 0 while it compiles or leaves.", serves)
    yield by_label("counter", "dmoe_node_updates_total", "Optimiser steps of each expert.", "uid", status["updates"])
    rows = (({"uid": uid, "kind": kind}, count) for (uid, kind), count in sorted(recorder.rows.items()))
    yield labelled("counter", "dmoe_node_rows_total", "Rows computed for each expert.", rows)


def _claim_families(claims: Mapping[str, Any]) -> Iterator[Family]:
    """Of a node that claims experts, see `dmoe_jax.claims`."""
    yield gauge("dmoe_node_claim_room", "Experts that the node may still claim.", claims["room"])
    yield gauge("dmoe_node_claims_held", "Claims whose experts are not served yet.", claims["held"])
    outcomes = {name: claims[name] for name in ("won", "lost", "failed")}
    yield by_label("counter", "dmoe_node_claims_total", "Claims for experts, by outcome.", "outcome", outcomes)
    text = "Experts that were left to another node, which served them too."
    yield counter("dmoe_node_given_up_total", text, claims["given_up"])
    text = "Experts that were taken up, by what they began with."
    yield by_label("counter", "dmoe_node_adopted_total", text, "origin", claims["adopted"])


def _outcome_of(error: CallFailed) -> str:
    return "busy" if isinstance(error, PeerBusy) else "refused" if isinstance(error, CallRefused) else "failed"
