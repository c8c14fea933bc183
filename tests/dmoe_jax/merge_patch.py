"""The other half of `dmoe_jax.live.events.changes`, as a page does it."""

from collections.abc import Mapping
from typing import Any


def merged(state: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state after a merge patch (RFC 7396); `state` stays as it is."""
    after = {name: value for name, value in state.items() if name not in patch or patch[name] is not None}
    for name, value in patch.items():
        if isinstance(value, dict):
            old = after.get(name)
            after[name] = merged(old if isinstance(old, dict) else {}, value)
        elif value is not None:
            after[name] = value
    return after
