"""The states of a run, of the records in its `metrics.jsonl`: a core, told one record after the other.

A run folder knows of its nodes what its trainers saw of them: which one answered for which expert, and the samples that
each expert got.
"""

from collections.abc import Mapping
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


class RunStates:
    """Turns records into states. What a damaged record lacks is left as it was."""

    def __init__(self) -> None:
        self.unit = "items"
        """Name of what trainers count."""
        self.is_over = False
        """True once the run has ended."""
        self.time_s = 0.0
        """Seconds of the run at the last record."""
        self._totals: dict[str, int | float] = {}
        self._nodes: dict[str, dict[str, Any]] = {}
        self._trainers: dict[str, dict[str, Any]] = {}
        self._groups: dict[str, dict[str, Any]] = {}
        self._news: list[list[object]] = []
        self._load: dict[str, int | float] = {}
        self._load_at_s = 0.0
        self._rated_s = 0.0
        self._since = dict.fromkeys(("items", "staleness", "steps", "calls"), 0.0)
        self._calls = 0.0

    def take(self, record: Mapping[str, Any]) -> None:
        """Take the next record."""
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
        self.is_over = self.is_over or kind == "headline"

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
        counts = {"peers": len(peers), "nodes": len(nodes), "trainers": len(self._trainers), "experts": len(self._load)}
        groups = {key: dict(group) for key, group in self._groups.items()}
        return self.time_s, {
            "totals": {**counts, **self._totals},
            "peers": peers,
            "groups": groups,
            "news": list(self._news[-MAX_NEWS:]),
        }

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
        name = f"trainer {known.get('trainer', 0)}"
        peer = self._trainers.setdefault(name, {"role": "trainer", "name": name, "state": "training", "facts": {}})
        peer["facts"] |= {each: known[each] for each in ("step", "loss", "staleness") if each in known}
        peer["facts"][self.unit] = peer["facts"].get(self.unit, 0) + items

    def _take_calls(self, record: Mapping[str, Any]) -> None:
        ok, failed = number_untrusted(record.get("ok")), number_untrusted(record.get("failed"))
        if ok is not None and failed is not None:
            self._since["calls"] += max(0.0, ok + failed - self._calls)
            self._calls = ok + failed
            self._totals["failed_calls"] = failed

    def _take_experts(self, record: Mapping[str, Any]) -> None:
        load, peers = record.get("load"), record.get("peer")
        served = peers if isinstance(peers, Mapping) else {}
        seconds = self.time_s - self._load_at_s
        if not isinstance(load, Mapping):
            return
        for node in self._nodes.values():
            node["experts"] = {}
        for uid, value in load.items():
            count = number_untrusted(value)
            if count is None:
                continue
            per_s = max(0.0, count - self._load.get(uid, 0.0)) / seconds if seconds > 0 else 0.0
            self._load[uid] = count
            self._node(str(served.get(uid, _HERE)))["experts"][uid] = [count, float(f"{per_s:.3g}")]
        self._load_at_s = self.time_s

    def _node(self, name: str) -> dict[str, Any]:
        """The node of this address."""
        name = name[: 4 * MAX_TEXT]
        usual = {"role": "node", "name": name, "state": "serving", "facts": {}, "experts": {}}
        return self._nodes.setdefault(name, usual)

    def _take_evaluation(self, record: Mapping[str, Any]) -> None:
        for name, field in (("validation_loss", "loss"), ("validation_perplexity", "perplexity")):
            self._set(name, record.get(field))

    def _take_average(self, record: Mapping[str, Any]) -> None:
        group = self._groups.setdefault("averages", {"averages": 0})
        told = {name: number_untrusted(record.get(name)) for name in ("peers", "peers_lost", "took_s")}
        group |= {name: value for name, value in told.items() if value is not None}
        group["averages"] += 1
        self._set("sent_mb", self._totals.get("sent_mb", 0.0) + (number_untrusted(record.get("sent_bytes")) or 0) / 1e6)

    def _take_global_step(self, record: Mapping[str, Any]) -> None:
        group = self._groups.setdefault("collaboration", {})
        told = {name: number_untrusted(value) for name, value in record.items() if name not in ("kind", "time_s")}
        group |= {str(name)[:MAX_TEXT]: value for name, value in told.items() if value is not None}

    def _take_event(self, record: Mapping[str, Any]) -> None:
        detail = record.get("detail")
        self._say(f"{str(record.get('name', 'event')).replace('_', ' ')}{f': {detail}' if detail else ''}")
        if record.get("name") == "node_killed" and (lost := str(record.get("peer", ""))) in self._nodes:
            self._nodes[lost]["state"] = "killed"


def _copy(peer: Mapping[str, Any]) -> dict[str, Any]:
    """A peer as it is now, which later records leave alone; its experts' figures are replaced, not changed."""
    copied = {**peer, "facts": dict(peer["facts"])}
    return copied | ({"experts": dict(peer["experts"])} if "experts" in peer else {})
