"""The requests of one layer call: which calls travel together, and as what. `dmoe_jax.expert_calls` is their form."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmoe_jax.expert_calls import index_of
from dmoe_jax.mixture.config import MixtureConfig
from net.identity import Contact
from net.rpc.base import Body
from net.types import Array
from net.wire.compression import Compression
from net.wire.tensors import Outgoing, as_outgoing

REQUEST_BYTES = 512 * 1024
"""Calls of one node travel together up to this size: one part on the wire. A node begins when it has a whole request,
so larger ones would keep it waiting for the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCall:
    """What one expert is asked.

    Attributes:
      uid: the expert.
      contact: the node that serves it.
      rows: int64 [n], the samples of the batch that it serves.
      slots: int64 [n], in which of its slots each of these samples has the expert.
    """

    uid: str
    contact: Contact
    rows: Array
    slots: Array


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """A call as part of a request.

    Attributes:
      index: its place among the calls of the layer.
      seen: see `ExpertCaller.fan_out`; None for a call that was moved to another node than its forward's.
      id: names it across retries.
      began: when this node was first asked, by trio's clock.
    """

    call: ExpertCall
    index: int
    seen: int | None
    id: bytes
    began: float


@dataclass(frozen=True, slots=True)
class LayerRequest:
    """Calls of one node that travel together; the other attributes are the arguments of `ExpertCaller.fan_out`."""

    method: str
    parts: Sequence[PlacedCall]
    inputs: Sequence[Array]
    output_grads: Array | None
    config: MixtureConfig
    common: Mapping[str, Any]

    def encoded(self, parts: Sequence[PlacedCall]) -> tuple[Body, list[Outgoing]]:
        """Body and tensors of a request for these of its parts."""
        compression = self.config.compression
        # Keys in the order of canonical CBOR, in which they are encoded faster.
        said = []
        for part in parts:
            said.append({"id": part.id, "uid": part.call.uid, "rows": len(part.call.rows)})
            if part.seen is not None:
                said[-1]["seen"] = part.seen
        body: dict[str, Any] = {"parts": said}
        if compression is not Compression.NONE:
            body["compression"] = compression.value
        body |= self.common
        distinct, index = index_of([part.call.rows for part in parts])
        is_all = len(distinct) == len(self.inputs[0])
        tensors = [array if is_all else array[distinct] for array in self.inputs]
        if self.output_grads is not None:
            rows = np.concatenate([part.call.rows for part in parts])
            slots = np.concatenate([part.call.slots for part in parts])
            tensors.append(self.output_grads[rows, slots])
        return body, [index, *(as_outgoing(tensor, compression) for tensor in tensors)]


def grouped(calls: Sequence[ExpertCall], *, row_bytes: int, most: int) -> list[list[int]]:
    """Which calls travel together: indices, in the calls' order.

    Those of one node do, but at most `most` of them, and not more than `REQUEST_BYTES`, unless one has more by itself.
    """
    groups: list[list[int]] = []
    open_groups: dict[Contact, tuple[list[int], int]] = {}  # by node: the last one, and its bytes
    for index, call in enumerate(calls):
        nbytes = len(call.rows) * row_bytes
        group, filled = open_groups.get(call.contact, ([], 0))
        if not group or len(group) >= most or filled + nbytes > REQUEST_BYTES:
            group, filled = [], 0
            groups.append(group)
        group.append(index)
        open_groups[call.contact] = group, filled + nbytes
    return groups


def row_bytes_of(inputs: Sequence[Array], output_grads: Array | None) -> int:
    """Of a row of a call, before compression."""
    own = 0 if output_grads is None else output_grads.nbytes // max(1, math.prod(output_grads.shape[:2]))
    return own + sum(array.nbytes // max(1, len(array)) for array in inputs)
