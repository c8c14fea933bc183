"""Reading what a trainer sent to an expert: everything is checked before it costs a flop.

A request that does not fit is refused with a message that says what was expected, in the words of the expert's own
specification, so that the person at the other end can mend it without reading this code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from dmoe_jax.expert_calls import MAX_ID_BYTES, MAX_UPDATES, Part, TooManyRows, is_finite, parts_of_untrusted
from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.experts.dropout import row_keys_of_seed
from net.errors import CallRefused, RemoteProtocolError
from net.rpc.base import Body, Request
from net.types import Array
from net.wire.compression import COMPRESSIONS, Compression
from net.wire.fields import integer, octets, optional

NOT_STALE = MAX_UPDATES
"""A gradient that saw so many updates is never stale."""

_SEEN = optional(integer(0, NOT_STALE))
_REQUEST_ID = octets(1, MAX_ID_BYTES)
_SEED = optional(integer(0, 2**63 - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRequest:
    """A checked part of a forward or backward request.

    Attributes:
      uid: the expert.
      inputs: one array per input specification, [rows, ...].
      output_grads: gradient of the output, [rows, ...]; None in a forward request, as the next.
      request_id: names a part of a backward request across retries.
      seen: how many updates the expert had taken when it computed this request's forward.
      keys: uint32 [rows, 2], a dropout key for each row; None in evaluation, and for an expert that takes none.
    """

    uid: str
    inputs: tuple[Array, ...]
    output_grads: Array | None = None
    request_id: bytes | None = None
    seen: int = NOT_STALE
    keys: Array | None = None

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return int(self.inputs[0].shape[0])

    @property
    def nbytes(self) -> int:
        """Size of its tensors as arrays."""
        grads = 0 if self.output_grads is None else self.output_grads.nbytes
        return grads + sum(array.nbytes for array in self.inputs)


def uid_of(body: Body, experts: Mapping[str, Expert]) -> str:
    """The expert that a body names.

    Raises:
      CallRefused: if it names none, or one that this node does not serve.
    """
    uid = body.get("uid")
    if not isinstance(uid, str):
        raise CallRefused(f"expected the uid of an expert as a string, got {uid!r:.80}")
    if uid not in experts:
        served = ", ".join(list(experts)[:4]) + (", ..." if len(experts) > 4 else "")
        raise CallRefused(f"unknown expert {uid[:80]!r}: this node serves {len(experts)} experts ({served})")
    return uid


def parse_request(
    request: Request, experts: Mapping[str, Expert], *, max_rows: int, backward: bool
) -> tuple[list[ExpertRequest | CallRefused], Compression]:
    """Check each part of a request against its expert's specification, see `dmoe_jax.expert_calls`.

    Returns: (the parts in their order, with what was expected in place of one that does not fit; how the float32
      tensors of the answer shall travel).

    Raises:
      CallRefused: the request as a whole does not fit.
    """
    try:
        parts = parts_of_untrusted(request)
        whole = _Whole(
            inputs=request.tensors[1:-1] if backward else request.tensors[1:],
            output_grads=request.tensors[-1] if backward else None,
            num_pairs=len(request.tensors[0]),
            seed=_SEED.of_untrusted(request.body, "dropout_seed"),
            is_finite=all(map(is_finite, request.tensors[1:])),
        )
    except RemoteProtocolError as error:
        raise CallRefused(str(error)) from error
    compression = _compression_of(request.body)
    parsed: list[ExpertRequest | CallRefused] = []
    for part in parts:
        try:
            uid = uid_of(part.body, experts)
            parsed.append(_parse_part(part, uid, experts[uid], whole, max_rows=max_rows))
        except CallRefused as refused:
            parsed.append(refused)
    return parsed, compression


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """What the parts of a request share.

    Attributes:
      inputs: each [rows, ...], if it fits the expert.
      output_grads: [pairs, ...] likewise; None in a forward request.
      num_pairs: rows of all parts.
      seed: of the dropout; None in evaluation.
      is_finite: every number of all tensors is.
    """

    inputs: tuple[Array, ...]
    output_grads: Array | None
    num_pairs: int
    seed: int | None
    is_finite: bool


def _parse_part(part: Part, uid: str, expert: Expert, whole: _Whole, *, max_rows: int) -> ExpertRequest:
    rows, grads, who = len(part.index), whole.output_grads, f"expert {uid}"
    if not 1 <= rows <= max_rows:
        message = f"{who}: expected 1 to {max_rows} rows in a part of a request, got {rows}"
        raise TooManyRows(message, max_rows=max_rows) if rows else CallRefused(message)
    num_tensors = len(whole.inputs) + (grads is not None)
    if len(whole.inputs) != len(expert.inputs):
        names = [f"input {spec.name!r}" for spec in expert.inputs]
        names += [] if grads is None else [f"gradient of {expert.output.name}"]
        listed = f"{len(names)} tensors ({', '.join(names)}) after the index"
        raise CallRefused(f"{who}: expected {listed}, got {num_tensors}")
    inputs = []
    for spec, array in zip(expert.inputs, whole.inputs, strict=True):
        _check_tensor(who, f"input {spec.name!r}", spec, array, rows=len(whole.inputs[0]))
        inputs.append(part.rows_of(array))
    if grads is not None:
        _check_tensor(who, f"gradient of {expert.output.name}", expert.output, grads, rows=whole.num_pairs)
        grads = part.pairs_of(grads)
    if not whole.is_finite:
        names = [f"input {spec.name!r}" for spec in expert.inputs] + [f"gradient of {expert.output.name}"]
        for name, array in zip(names, [*inputs, *([] if grads is None else [grads])], strict=False):
            if not is_finite(array):
                raise CallRefused(f"{who}: expected finite numbers in {name}, got NaN or infinity")
    try:
        request_id = _REQUEST_ID.of_untrusted(part.body, "id") if grads is not None else None
        seen = _SEEN.of_untrusted(part.body, "seen") if grads is not None else None
    except RemoteProtocolError as error:
        raise CallRefused(f"{who}: {error}") from error
    takes_keys = whole.seed is not None and expert.takes_key
    return ExpertRequest(
        uid=uid,
        inputs=tuple(inputs),
        output_grads=grads,
        request_id=request_id,
        seen=NOT_STALE if seen is None else seen,  # of a peer that does not know of staleness nothing is stale
        keys=row_keys_of_seed(cast(int, whole.seed), rows) if takes_keys else None,
    )


def _compression_of(body: Body) -> Compression:
    if "compression" not in body:
        return Compression.NONE
    name = body["compression"]
    if not isinstance(name, str) or name not in COMPRESSIONS:
        raise CallRefused(f"expected a compression among {', '.join(COMPRESSIONS)}, or none at all, got {name!r:.80}")
    return COMPRESSIONS[name]


def _check_tensor(who: str, what: str, spec: TensorSpec, tensor: Array, *, rows: int) -> None:
    if tensor.shape != (rows, *spec.shape) or tensor.dtype != np.dtype(spec.dtype):
        expected = f"{spec.dtype}[{', '.join(map(str, ('rows', *spec.shape)))}] with {rows} rows"
        raise CallRefused(f"{who}: expected {what} as {expected}, got {tensor.dtype}{list(tensor.shape)}")
