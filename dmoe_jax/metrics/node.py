"""The counts of an expert node, and the families that show them."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dmoe_jax.metrics.families import (
    POWERS_OF_TWO,
    SECONDS,
    UPDATES,
    Family,
    Histogram,
    Kind,
    by_label,
    counter,
    gauge,
    histogram,
    labelled,
)
from dmoe_net.errors import CallFailed, CallRefused, PeerBusy

KINDS = ("forward", "backward")


@dataclass(slots=True, eq=False)
class ExpertCounts:
    """The work of one expert of one kind, forward or backward; `_OF_EXPERTS` says what each field counts."""

    batches: int = 0
    rows: int = 0
    queue_s: float = 0.0
    device_s: float = 0.0
    staleness: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


class NodeRecorder:
    """Counts of one node since its start; everything here only grows."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str, str]] = Counter()
        """Calls by expert, kind and outcome: ok, busy, refused, failed, or given up by their caller; without an expert
        ("") those that were refused when they were checked."""
        self.batch_rows = {kind: Histogram(POWERS_OF_TWO) for kind in KINDS}
        self.queue_s = {kind: Histogram(SECONDS) for kind in KINDS}
        self.device_s = {kind: Histogram(SECONDS) for kind in KINDS}
        self.staleness = Histogram(UPDATES)
        self.experts: defaultdict[tuple[str, str], ExpertCounts] = defaultdict(ExpertCounts)
        """Counts by uid and kind: two entries for each expert ever served."""
        self.malformed = 0
        """Number of requests that were refused because they do not fit."""

    def ended(self, kind: str, uid: str, error: CallFailed | None = None) -> None:
        """A call of this expert was answered, with this error if it failed."""
        refused = "busy" if isinstance(error, PeerBusy) else "refused" if isinstance(error, CallRefused) else "failed"
        self.calls[uid, kind, "ok" if error is None else refused] += 1

    def given_up(self, kind: str, uid: str) -> None:
        """Nobody waits for a call of this expert any more."""
        self.calls[uid, kind, "given up"] += 1

    def does_not_fit(self, kind: str) -> None:
        """A call was refused when it was checked."""
        self.malformed += 1
        self.calls["", kind, "refused"] += 1

    def batch(
        self,
        kind: str,
        uid: str,
        *,
        rows: Sequence[int],
        waited_s: Sequence[float],
        device_s: float,
        staleness: Sequence[int] = (),
        received_bytes: int = 0,
        sent_bytes: int = 0,
    ) -> None:
        """A batch of an expert was computed; `rows`, `waited_s` and `staleness` are those of each request in it."""
        total = sum(rows)
        self.batch_rows[kind].observe(total)
        self.device_s[kind].observe(device_s)
        own = self.experts[uid, kind]
        own.batches += 1
        own.rows += total
        own.queue_s += sum(waited_s)
        own.device_s += device_s
        own.staleness += sum(staleness)
        own.received_bytes += received_bytes
        own.sent_bytes += sent_bytes
        for seconds in waited_s:
            self.queue_s[kind].observe(seconds)
        for updates in staleness:
            self.staleness.observe(updates)


def node_families(recorder: NodeRecorder, status: Mapping[str, Any]) -> Iterator[Family]:
    """The families of a node; `status` is what `ExpertNode.status` says."""
    outcomes: Counter[tuple[str, str]] = Counter()
    for (_, kind, outcome), count in recorder.calls.items():
        outcomes[kind, outcome] += count
    calls = (({"kind": kind, "outcome": outcome}, count) for (kind, outcome), count in sorted(outcomes.items()))
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
    for kind, name, text, key in _OF_DEVICES:
        yield by_label(kind, name, text, "device", {each["name"]: each[key] for each in status["devices"]})
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
    yield from _expert_families(recorder)


def _expert_families(recorder: NodeRecorder) -> Iterator[Family]:
    calls = (
        ({"uid": uid, "kind": kind, "outcome": outcome}, count)
        for (uid, kind, outcome), count in sorted(recorder.calls.items())
        if uid
    )
    text = "Calls of each expert, by kind and outcome; without those that do not fit."
    yield labelled("counter", "dmoe_node_expert_calls_total", text, calls)
    counts = sorted(recorder.experts.items())
    for name, text, attribute in _OF_EXPERTS:
        samples = (({"uid": uid, "kind": kind}, getattr(each, attribute)) for (uid, kind), each in counts)
        yield labelled("counter", name, text, samples)


_OF_DEVICES: tuple[tuple[Kind, str, str, str], ...] = (
    ("counter", "dmoe_node_each_device_busy_seconds_total", "Time in which each device worked on batches.", "busy_s"),
    ("counter", "dmoe_node_each_device_rows_total", "Rows that each device computed.", "rows"),
    ("gauge", "dmoe_node_each_device_waiting_rows", "Rows that wait for each device.", "waiting_rows"),
    ("gauge", "dmoe_node_each_device_state_bytes", "Parameters and optimiser state on each device.", "nbytes"),
)
"""Kind, name, text, and the key in what `ExpertNode.status` says of a device."""

_OF_EXPERTS = (
    ("dmoe_node_rows_total", "Rows computed for each expert.", "rows"),
    ("dmoe_node_expert_batches_total", "Batches of each expert.", "batches"),
    (
        "dmoe_node_expert_queue_seconds_total",
        "Time that all requests of an expert waited for their batches to begin.",
        "queue_s",
    ),
    (
        "dmoe_node_expert_device_seconds_total",
        "Time of an expert's batches on the device; its equal share where a program computes several experts.",
        "device_s",
    ),
    (
        "dmoe_node_expert_staleness_updates_total",
        "Updates between an expert's forward and its update by the same request, summed over its requests.",
        "staleness",
    ),
    ("dmoe_node_expert_received_bytes_total", "Tensors that were computed with, before compression.", "received_bytes"),
    ("dmoe_node_expert_sent_bytes_total", "Results that were computed, before compression.", "sent_bytes"),
)
"""Name, text, and the attribute of `ExpertCounts`."""


def _claim_families(claims: Mapping[str, Any]) -> Iterator[Family]:
    yield gauge("dmoe_node_claim_room", "Experts that the node may still claim.", claims["room"])
    yield gauge("dmoe_node_claims_held", "Claims whose experts are not served yet.", claims["held"])
    outcomes = {name: claims[name] for name in ("won", "lost", "failed")}
    yield by_label("counter", "dmoe_node_claims_total", "Claims for experts, by outcome.", "outcome", outcomes)
    text = "Experts that were left to another node, which served them too."
    yield counter("dmoe_node_given_up_total", text, claims["given_up"])
    text = "Experts that were taken up, by what they began with."
    yield by_label("counter", "dmoe_node_adopted_total", text, "origin", claims["adopted"])
