"""The states of a run, of the records in its `metrics.jsonl`: a core, told one record after the other.

A run folder knows of its nodes what its trainers saw of them: which one answered for which expert, and the samples that
each expert got. Of a run whose trainers are several processes each has a folder of its own, and a clock that begins
with its first step.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dmoe_jax.directory.members import MAX_TEXT
from dmoe_jax.live.events import State
from dmoe_jax.live.snapshot import MAX_NEWS, number_untrusted

_SMOOTH = 0.9
"""Weight of the past in the loss that is shown: single batches jump."""

RATES_S = 1.0
"""Seconds over which rates are taken, at least: records of one moment follow each other within milliseconds."""

_HERE = "this process"
"""Name of what serves experts that no node serves: a model that is not remote."""


@dataclass(slots=True)
class _Process:
    """Counters that one process's records have told last."""

    calls: float = 0.0
    failed: int | float = 0
    averages: int = 0
    load: dict[str, int | float] = field(default_factory=dict)
    per_s: dict[str, float] = field(default_factory=dict)
    load_at_s: float = 0.0
    is_over: bool = False


class RunStates:
    """Turns records into states. What a damaged record lacks is left as it was."""

    def __init__(self) -> None:
        self.unit = "items"
        """Name of what trainers count."""
        self.time_s = 0.0
        """Seconds of the run at the last record."""
        self._totals: dict[str, int | float] = {}
        self._nodes: dict[str, dict[str, Any]] = {}
        self._trainers: dict[str, dict[str, Any]] = {}
        self._groups: dict[str, dict[str, Any]] = {}
        self._news: list[list[object]] = []
        self._served: dict[str, str] = {}  # expert -> the node that answered for it last
        self._rated_s = 0.0
        self._since = dict.fromkeys(("items", "staleness", "steps", "calls"), 0.0)
        self._processes: defaultdict[int, _Process] = defaultdict(_Process)
        self._number = 0  # of the process whose record is taken

    @property
    def is_over(self) -> bool:
        """True once the run has ended, in all of its processes."""
        return bool(self._processes) and all(process.is_over for process in self._processes.values())

    def take(self, record: Mapping[str, Any], number: int = 0) -> None:
        """Take the next record, of the process of this number."""
        self._number, process = number, self._processes[number]
        time_s = number_untrusted(record.get("time_s"))
        self.time_s = max(self.time_s, float(time_s or 0.0))
        taken = {
            "task": self._take_task,
            "train": self._take_train,
            "calls": self._take_calls,
            "experts": self._take_experts,
            "eval": self._take_evaluation,
            "final_eval": self._take_evaluation,
            "average": self._take_average,
            "global_step": self._take_global_step,
            "event": self._take_event,
        }
        kind = record.get("kind")
        if kind in taken:
            taken[str(kind)](record)
        process.is_over |= kind == "headline"

    def state(self) -> tuple[float, State]:
        """Return the seconds of the run, and its state, with rates over at least `RATES_S`."""
        seconds, since = self.time_s - self._rated_s, self._since
        if seconds >= RATES_S:
            self._set("items_per_s", since["items"] / seconds if since["items"] else None)
            self._set("calls_per_s", since["calls"] / seconds if since["calls"] else None)
            self._set("staleness", since["staleness"] / since["steps"] if since["steps"] else None)
            self._rated_s, self._since = self.time_s, dict.fromkeys(since, 0.0)
        nodes = {f"node {name}": node for name, node in self._nodes.items()}
        peers = {key: _copy(peer) for key, peer in [*nodes.items(), *self._trainers.items()]}
        counts = {"peers": len(peers), "nodes": len(nodes), "trainers": len(self._trainers)}
        counts["experts"] = len(self._served)
        groups = {key: dict(group) for key, group in self._groups.items()}
        return self.time_s, {
            "totals": {**counts, **self._totals},
            "peers": peers,
            "groups": groups,
            "news": list(self._news[-MAX_NEWS:]),
        }

    @property
    def _place(self) -> str:
        """Words that tell the trainers of further processes from those of the first one."""
        return f"process {self._number}, " if self._number else ""

    def _set(self, name: str, value: object) -> None:
        if (number := number_untrusted(value)) is not None:
            self._totals[name] = number

    def _say(self, text: str) -> None:
        self._news = [*self._news, [round(self.time_s, 3), text[: 4 * MAX_TEXT]]][-MAX_NEWS:]

    def _take_task(self, record: Mapping[str, Any]) -> None:
        self.unit = str(record.get("unit", self.unit))[:MAX_TEXT]

    def _take_train(self, record: Mapping[str, Any]) -> None:
        told = {name: number_untrusted(record.get(name)) for name in ("step", "loss", "items", "staleness", "trainer")}
        known = {name: value for name, value in told.items() if value is not None}
        step, items = known.get("step", 0), known.get("items", 0)
        self._totals["step"] = max(self._totals.get("step", 0), step)
        if "loss" in known:
            before = self._totals.get("loss", known["loss"])
            self._set("loss", _SMOOTH * before + (1 - _SMOOTH) * known["loss"])
        self._since["items"] += items
        self._since["steps"] += 1
        self._since["staleness"] += known.get("staleness", 0)
        name = f"{self._place}trainer {known.get('trainer', 0)}"
        peer = self._trainers.setdefault(name, {"role": "trainer", "name": name, "state": "training", "facts": {}})
        peer["facts"] |= {each: known[each] for each in ("step", "loss", "staleness") if each in known}
        peer["facts"][self.unit] = peer["facts"].get(self.unit, 0) + items

    def _take_calls(self, record: Mapping[str, Any]) -> None:
        ok, failed = number_untrusted(record.get("ok")), number_untrusted(record.get("failed"))
        if ok is not None and failed is not None:
            process = self._processes[self._number]
            self._since["calls"] += max(0.0, ok + failed - process.calls)
            process.calls, process.failed = ok + failed, failed
            self._totals["failed_calls"] = sum(each.failed for each in self._processes.values())

    def _take_experts(self, record: Mapping[str, Any]) -> None:
        load, peers = record.get("load"), record.get("peer")
        served = peers if isinstance(peers, Mapping) else {}
        process = self._processes[self._number]
        seconds = self.time_s - process.load_at_s
        if not isinstance(load, Mapping):
            return
        for uid, value in load.items():
            if (count := number_untrusted(value)) is not None:
                grown = max(0.0, count - process.load.get(uid, 0.0))
                process.load[uid], process.per_s[uid] = count, grown / seconds if seconds > 0 else 0.0
                self._served[uid] = str(served.get(uid) or self._served.get(uid, _HERE))
        process.load_at_s = self.time_s
        for node in self._nodes.values():
            node["experts"] = {}
        for uid, name in self._served.items():
            per_s = sum(each.per_s.get(uid, 0.0) for each in self._processes.values())
            count = sum(each.load.get(uid, 0) for each in self._processes.values())
            self._node(name)["experts"][uid] = [count, float(f"{per_s:.3g}")]

    def _node(self, name: str) -> dict[str, Any]:
        name = name[: 4 * MAX_TEXT]
        usual = {"role": "node", "name": name, "state": "serving", "facts": {}, "experts": {}}
        return self._nodes.setdefault(name, usual)

    def _take_evaluation(self, record: Mapping[str, Any]) -> None:
        if self._number:  # processes beside the first one read less: its evaluations are the run's
            return
        for name in ("loss", "perplexity"):
            self._set(f"validation_{name}", record.get(name))

    def _take_average(self, record: Mapping[str, Any]) -> None:
        group, process = self._groups.setdefault("averages", {}), self._processes[self._number]
        told = {name: number_untrusted(record.get(name)) for name in ("peers", "peers_lost", "took_s")}
        group |= {name: value for name, value in told.items() if value is not None}
        process.averages += 1
        group["averages"] = max(each.averages for each in self._processes.values())
        self._set("sent_mb", self._totals.get("sent_mb", 0.0) + (number_untrusted(record.get("sent_bytes")) or 0) / 1e6)

    def _take_global_step(self, record: Mapping[str, Any]) -> None:
        group = self._groups.setdefault("collaboration", {})
        told = {name: number_untrusted(value) for name, value in record.items() if name not in ("kind", "time_s")}
        group |= {str(name)[:MAX_TEXT]: value for name, value in told.items() if value is not None}

    def _take_event(self, record: Mapping[str, Any]) -> None:
        detail = record.get("detail")
        self._say(f"{self._place}{str(record.get('name', 'event')).replace('_', ' ')}{f': {detail}' if detail else ''}")
        if record.get("name") == "node_killed" and (lost := str(record.get("peer", ""))) in self._nodes:
            self._nodes[lost]["state"] = "killed"


def _copy(peer: Mapping[str, Any]) -> dict[str, Any]:
    """A peer as it is now, which later records leave alone; its experts' figures are replaced, not changed."""
    copied = {**peer, "facts": dict(peer["facts"])}
    return copied | ({"experts": dict(peer["experts"])} if "experts" in peer else {})
