"""Two nodes serve one expert: which of them gives it up.

This is the one place for the rule. Whoever lets several nodes serve an expert on purpose teaches it here, by what a
`Standing` says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import PeerId

MAX_UPDATES = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a node has to say for itself in a contest for an expert."""

    peer_id: PeerId
    """Who serves it."""
    updates: int
    """Optimiser steps that its copy has taken."""
    is_fixed: bool = False
    """Whether the node was told by name to serve it, and has not claimed it. Such a node never gives it up."""


def gives_up(own: Standing, other: Standing) -> bool:
    """Whether the node of `own` gives its expert up to `other`.

    The copy with fewer updates goes; of equal ones that of the smaller peer id. A node that claimed its expert goes
    before one that was told to serve it, and of two that were told neither goes.
    """
    if own.is_fixed or other.is_fixed:
        return not own.is_fixed
    return (own.updates, own.peer_id) < (other.updates, other.peer_id)


def standing_untrusted(status: Mapping[str, Any], uid: str, peer_id: PeerId) -> Standing | None:
    """What a node's `node.status` says of an expert; None if the node does not serve it.

    Raises:
      RemoteProtocolError: the status is none.
    """
    updates, claims = status.get("updates"), status.get("claims")
    if not isinstance(updates, dict) or not (claims is None or isinstance(claims, dict)):
        raise RemoteProtocolError(f"a node's status has a map of updates, and of claims if any, got {status!r:.80}")
    if uid not in updates:
        return None
    count, fixed = updates[uid], [uid] if claims is None else claims.get("fixed")
    if type(count) is not int or not 0 <= count <= MAX_UPDATES or not isinstance(fixed, list):
        raise RemoteProtocolError(f"expected a count of updates and a list of fixed experts, got {count!r:.80}")
    return Standing(peer_id=peer_id, updates=count, is_fixed=uid in fixed)
