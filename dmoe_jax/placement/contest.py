"""More nodes serve an expert than are wanted: which of them give it up."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import PeerId

MAX_UPDATES = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Claim of a node to keep an expert."""

    peer_id: PeerId
    """The node."""
    updates: int
    """Optimiser steps that its copy has taken."""
    is_fixed: bool = False
    """True if the node was told by name to serve it, and has not claimed it. Such a node never gives it up."""


def gives_up_to(own: Standing, others: Iterable[Standing], replicas: int) -> list[Standing]:
    """The holders that have to keep an expert so that the node of `own` may give it up; none: it keeps it.

    The copy with more updates goes before others; of equal ones that of the larger peer id. A node that was told to
    serve its expert goes before one that claimed it. `others` are all other living holders.
    """
    before = sorted((each for each in others if _rank(each) > _rank(own)), key=_rank, reverse=True)
    return before[:replicas] if not own.is_fixed and len(before) >= replicas else []


def _rank(each: Standing) -> tuple[bool, int, PeerId]:
    return each.is_fixed, each.updates, each.peer_id


def standing_untrusted(status: Mapping[str, Any], uid: str, peer_id: PeerId) -> Standing | None:
    """Standing of a node for an expert, from its `node.status`; None if the node does not serve the expert.

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
