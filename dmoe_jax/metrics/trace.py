"""A run's calls and steps as a trace that chrome://tracing and Perfetto (ui.perfetto.dev) open.

The format is the Trace Event Format in JSON (Google, 2016). Each host is a process of the trace and this process's
trainers are another. Events of one thread may not overlap there, so each host has as many lanes as it had calls at
once, and each call takes the first one that is free.
"""

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dmoe_jax.mixture.statistics import CallRecord
from dmoe_jax.runs.run_folder import replaced_file
from dmoe_jax.trainer import StepSpan

MAX_EVENTS = 100_000
"""Number of events that a trace keeps, the latest ones: 20 MB of memory, and as large a file."""

_TRAINERS = "trainers"


class Trace:
    """Events of one run, as they end; written at its end. It begins at `began` of trio's clock."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._records: deque[CallRecord | StepSpan] = deque(maxlen=MAX_EVENTS)
        self.dropped = 0
        """Number of events that made room for later ones."""

    def add(self, record: CallRecord | StepSpan) -> None:
        """An expert call, or a trainer's step, has ended."""
        self.dropped += len(self._records) == self._records.maxlen
        self._records.append(record)

    def events(self) -> Iterator[dict[str, Any]]:
        """The trace's events as plain data: names of the hosts, then what happened, in order of its beginning."""
        records = sorted(self._records, key=lambda record: (record.began, record.ended))
        hosts = {_TRAINERS: 1}
        for record in records:
            hosts.setdefault(_host_of(record), len(hosts) + 1)
        for host, number in hosts.items():
            yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": host}}
        free_at: dict[str, list[float]] = {}
        for record in records:
            host = _host_of(record)
            if isinstance(record, StepSpan):
                lane, name = record.trainer, "step"
                details: dict[str, Any] = {"outcome": record.outcome}
            else:
                lane = _free_lane(free_at.setdefault(host, []), record)
                kind = record.method.rpartition(".")[2]
                name = f"{kind} {record.uid}"
                details = {"uid": record.uid, "kind": kind, "rows": record.rows, "outcome": record.outcome}
            yield {
                "ph": "X",
                "name": name,
                "cat": "ok" if record.outcome == "ok" else "failed",
                "pid": hosts[host],
                "tid": lane,
                "ts": round(1e6 * (record.began - self._began), 3),
                "dur": round(1e6 * (record.ended - record.began), 3),
                "args": details,
            }

    def write(self, path: Path) -> None:
        """Write the trace, at once: whoever opens the file finds a whole one. Raises OSError."""
        kept = {"events_kept": len(self._records), "events_dropped": self.dropped}
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(kept)}, "traceEvents": [')
            # Event by event: all of them as text at once would take several times what they take in the file.
            for number, event in enumerate(self.events()):
                file.write(("," if number else "") + "\n" + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")


def _host_of(record: CallRecord | StepSpan) -> str:
    if isinstance(record, StepSpan):
        return _TRAINERS
    return f"{record.contact.peer_id.short} at {record.contact.address}"


def _free_lane(free_at: list[float], record: CallRecord) -> int:
    """The first lane of a host that is free when the call begins; it is taken until the call ends."""
    lane = next((index for index, free in enumerate(free_at) if free <= record.began), len(free_at))
    free_at[lane : lane + 1] = [record.ended]
    return lane
