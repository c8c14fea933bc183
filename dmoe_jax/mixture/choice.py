"""Which experts the samples of a batch go to, and the calls that serve them."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dmoe_jax.grid import ExpertUid, format_uid
from dmoe_jax.mixture.fan_out import ExpertCall
from dmoe_jax.routing.base import Router, Scores
from net.identity import Contact
from net.types import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which experts a batch goes to.

    Attributes:
      indices: int32 [batch, slots, dims], coordinates of each sample's experts; zeros in slots that stay empty.
      calls: one for each distinct expert.
      slots: for each call int64 [n], in which of its slots each of the call's rows has this expert.
    """

    indices: Array
    calls: tuple[ExpertCall, ...]
    slots: tuple[Array, ...]


def grouped(indices: Array, places: Iterable[tuple[int, int, ExpertUid, Contact]]) -> Choice:
    """One call for each distinct expert of (row, slot, uid, contact)."""
    members: dict[tuple[str, Contact], list[tuple[int, int]]] = {}
    for row, slot, uid, contact in places:
        members.setdefault((format_uid(uid), contact), []).append((row, slot))
    calls = tuple(
        ExpertCall(uid=uid, contact=contact, rows=np.array([row for row, _ in pairs]))
        for (uid, contact), pairs in members.items()
    )
    slots = tuple(np.array([slot for _, slot in pairs]) for pairs in members.values())
    return Choice(indices=indices, calls=calls, slots=slots)


@functools.cache
def select_program(router: Router, k: int) -> Any:
    """The compiled (scores, alive) -> (indices, mask) of this router, made once."""

    def select(scores: Scores, alive: Any) -> tuple[Any, Any]:
        return router.select(scores, k, alive)

    return jax.jit(select)
