"""Events of a watched swarm: JSON objects, one in a line, each with a `time` in seconds and a `what`.

    {"time": 0, "what": "about", "title": ..., "kind": ..., "load": ..., "unit": ..., "past": [...]}
    {"time": 0, "what": "all", "state": {...}}
    {"time": 2, "what": "changes", "state": {...}}
    {"time": 9, "what": "end"}

`changes` holds the merge patch (RFC 7396) from the state before: objects are merged, and null takes a name away; a
state itself holds no null. Time is virtual where the swarm's is.
"""

import json
from collections.abc import Mapping
from typing import Any

State = dict[str, Any]
"""A swarm at one moment, as plain JSON without null.

Keys: `totals`, numbers by name; `peers`, by key: `role`, `name`, `state`, `address`, `facts` (texts and numbers by
name) and `experts`, uid -> [count, count per second]; `groups`, by key: facts of peers that average together; `news`,
the last events as [seconds, text]. Of a peer all but `role` and `name` may be missing.
"""


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch that makes `before` to `after`; empty if they are equal."""
    patch: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            if old is not value and (inner := changes(old, value)):
                patch[name] = inner
        elif old != value:
            patch[name] = value
    return patch


def line_of(what: str, time_s: float, **fields: Any) -> str:
    """Return an event as a line of JSON, without the line feed. Raises ValueError for a number that is not finite."""
    event = {"time": round(time_s, 3), "what": what, **fields}
    return json.dumps(event, allow_nan=False, separators=(",", ":"))


def step_of(time_s: float, before: State | None, after: State) -> str:
    """Return the event that brings a reader from one state to the next; from none, if that is the first."""
    if before is None:
        return line_of("all", time_s, state=after)
    return line_of("changes", time_s, state=changes(before, after))


def about(title: str, kind: str, *, load: str = "updates", unit: str = "items", past: list[Any] | None = None) -> str:
    """Return the event with which a stream begins.

    Args:
      title: name of what is watched.
      kind: "live": the state now matters; "recorded": each state stays, and the page has a slider of time.
      load: name of what experts count.
      unit: name of what trainers count.
      past: [seconds, totals] of states before the first one, for the curves.
    """
    return line_of("about", 0.0, title=title, kind=kind, load=load, unit=unit, past=past or [])
