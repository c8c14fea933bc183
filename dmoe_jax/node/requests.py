"""Reading what a trainer sent to an expert: everything is checked before it costs a flop.

A request that does not fit is refused with a message that says what was expected, in the words of the expert's own
specification, so that the person at the other end can mend it without reading this code.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.experts.dropout import row_keys_of_seed
from dmoe_jax.node.replay import MAX_REQUEST_ID_BYTES
from net.errors import CallRefused, RemoteProtocolError
from net.rpc.base import Request
from net.types import Array
from net.wire.compression import COMPRESSIONS, Compression
from net.wire.fields import integer, optional

NOT_STALE = 2**63 - 1
"""Beyond every expert's count of updates: a gradient that saw so many is never stale."""

_SEEN = optional(integer(0, NOT_STALE))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRequest:
    """A checked forward or backward request.

    Attributes:
      uid: the expert.
      inputs: one array per input specification, [rows, ...].
      output_grads: gradient of the output, [rows, ...]; None in a forward request, as the next.
      request_id: names a backward request across retries.
      seen: how many updates the expert had taken when it computed this request's forward.
      keys: uint32 [rows, 2], a dropout key for each row; None in evaluation, and for an expert that takes none.
      compression: how the float32 tensors of the answer shall travel.
    """

    uid: str
    inputs: tuple[Array, ...]
    output_grads: Array | None = None
    request_id: bytes | None = None
    seen: int = NOT_STALE
    keys: Array | None = None
    compression: Compression = Compression.NONE

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return int(self.inputs[0].shape[0])


def uid_of(request: Request, experts: Mapping[str, Expert]) -> str:
    """The expert that the request names.

    Raises:
      CallRefused: if it names none, or one that this node does not serve.
    """
    uid = request.body.get("uid")
    if not isinstance(uid, str):
        raise CallRefused(f"expected the uid of an expert as a string, got {uid!r:.80}")
    if uid not in experts:
        served = ", ".join(list(experts)[:4]) + (", ..." if len(experts) > 4 else "")
        raise CallRefused(f"unknown expert {uid[:80]!r}: this node serves {len(experts)} experts ({served})")
    return uid


def parse_request(request: Request, experts: Mapping[str, Expert], *, max_rows: int, backward: bool) -> ExpertRequest:
    """Check a request against the expert's specification: inputs, and for backward the output's gradient and an id.

    Raises:
      CallRefused: with what was expected.
    """
    uid = uid_of(request, experts)
    expert, tensors = experts[uid], request.tensors
    specs = [(f"input {spec.name!r}", spec) for spec in expert.inputs]
    if backward:
        specs.append((f"gradient of {expert.output.name}", expert.output))
    if len(tensors) != len(specs):
        names = ", ".join(what for what, _ in specs)
        raise CallRefused(f"expert {uid}: expected {len(specs)} tensors ({names}), got {len(tensors)}")
    rows = tensors[0].shape[0] if tensors[0].ndim else 0
    if not 1 <= rows <= max_rows:
        raise CallRefused(f"expert {uid}: expected 1 to {max_rows} rows in a request, got {rows}")
    for (what, spec), tensor in zip(specs, tensors, strict=True):
        _check_tensor(uid, what, spec, tensor, rows=rows)

    request_id = request.body.get("request_id") if backward else None
    if backward and (not isinstance(request_id, bytes) or not 1 <= len(request_id) <= MAX_REQUEST_ID_BYTES):
        raise CallRefused(
            f"expert {uid}: expected a request_id of 1 to {MAX_REQUEST_ID_BYTES} bytes in a backward request"
        )
    return ExpertRequest(
        uid=uid,
        inputs=tensors[: len(expert.inputs)],
        output_grads=tensors[-1] if backward else None,
        request_id=request_id,
        seen=_seen_of(uid, request) if backward else NOT_STALE,
        keys=_keys_of(uid, expert, request, rows=rows),
        compression=_compression_of(uid, request),
    )


def _seen_of(uid: str, request: Request) -> int:
    """The request's "seen"; without it, as of a peer that does not know of staleness, nothing is stale."""
    try:
        seen = _SEEN.of_untrusted(request.body, "seen")
    except RemoteProtocolError as error:
        raise CallRefused(f"expert {uid}: {error}") from error
    return NOT_STALE if seen is None else seen


def _compression_of(uid: str, request: Request) -> Compression:
    if "compression" not in request.body:
        return Compression.NONE
    name = request.body["compression"]
    if not isinstance(name, str) or name not in COMPRESSIONS:
        raise CallRefused(
            f"expert {uid}: expected a compression among {', '.join(COMPRESSIONS)}, or none at all, got {name!r:.80}"
        )
    return COMPRESSIONS[name]


def _keys_of(uid: str, expert: Expert, request: Request, *, rows: int) -> Array | None:
    """A key for each row from the request's "dropout_seed"; None if it has none, or the expert takes none."""
    if "dropout_seed" not in request.body:
        return None
    seed = request.body["dropout_seed"]
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise CallRefused(
            f"expert {uid}: expected a dropout_seed from 0 to 2**63 - 1, or none at all, got {seed!r:.80}"
        )
    return row_keys_of_seed(seed, rows) if expert.takes_key else None


def _check_tensor(uid: str, what: str, spec: TensorSpec, tensor: Array, *, rows: int) -> None:
    if tensor.shape != (rows, *spec.shape) or tensor.dtype != np.dtype(spec.dtype):
        expected = f"{spec.dtype}[{', '.join(map(str, ('rows', *spec.shape)))}] with {rows} rows"
        raise CallRefused(f"expert {uid}: expected {what} as {expected}, got {tensor.dtype}{list(tensor.shape)}")
    # Unlike NumPy's, JAX's issubdtype knows bfloat16 and its kin as floating.
    if jnp.issubdtype(tensor.dtype, jnp.inexact) and not np.isfinite(tensor).all():
        raise CallRefused(f"expert {uid}: expected finite numbers in {what}, got NaN or infinity")
