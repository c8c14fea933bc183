"""Calls of experts, and the form of the requests and answers by which trainers and nodes speak of them.

A request asks experts of one node for one kind of work, `expert.forward` or `expert.backward`, and has a *part* for
each of them. The *pairs* of a request are the rows of its parts, one part after the other; its index says which row of
the inputs each pair takes, so that a sample which several experts of the node are to get travels once.

    body     {"parts": [{"uid", "rows", "id", "seen"}, ...], "compression", "dropout_seed"}
    tensors  the index, int32 [pairs]; the inputs, each [rows, ...]; backward also the gradient of the output,
             [pairs, ...]

A part's "rows" are how many pairs it has, its "id" names it across retries, and "seen" is how many updates the expert
had taken when it computed this part's forward. Optional are "seen", "compression", "dropout_seed", and in forward
requests "id". The seed of a layer call is the same forward and backward; without one an expert runs in evaluation mode.

Each part is answered by itself, exactly once. Those that are ready go ahead of the others, unless these follow within a
few milliseconds, in partials of the answer (`dmoe_net.rpc.base.Request.send_partial`), and the reply brings the rest.
Partials and reply have one form:

    body     {"answers": [{"part", "updates"} or {"part", "error", "message", "retry_after_s", "max_rows"}, ...]}
    tensors  for the parts with "updates", in this order and one below the other, [their rows, ...]: the output, or the
             gradients of the differentiable inputs

"part" is a part's place in the request, "updates" how many updates the expert has taken, and "error" one of "refused",
"busy" and "failure", as of a call that fails. A part that finds the node busy may be told after how many seconds to ask
again, and one that is refused for its size how many rows a part may have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from dmoe_net.errors import CallFailed, CallRefused, PeerBusy, RemoteProtocolError
from dmoe_net.identity import Contact
from dmoe_net.rpc.base import CALL_ERRORS, Body, Reply, Request, kind_of
from dmoe_net.types import Array
from dmoe_net.wire.compression import Compression
from dmoe_net.wire.fields import MAPPING, choice, integer, optional, real, rows, text
from dmoe_net.wire.messages import MAX_ERROR_CHARACTERS, ErrorKind, error_text
from dmoe_net.wire.tensors import Outgoing, as_outgoing, plain

FORWARD, BACKWARD = "expert.forward", "expert.backward"
"""The methods."""
MAX_PARTS = 64
"""Most parts of a request: their descriptions must fit into a header, and more would gain nothing."""
MAX_ID_BYTES = 32
"""Longest id of a part."""
MAX_UPDATES = 2**63 - 1
"""Most updates of an expert; beyond it nobody counts."""
MAX_PAIRS = 2**31 - 1
"""Most pairs of a request: its index can say no more."""
REMEMBERED_S = 60.0
"""Seconds for which an expert remembers, at least, that it has learnt from a request. Later than that after it was
first placed, a backward request is not sent again, or it could train an expert twice."""
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.05, 60.0
"""Shortest and longest time that a busy node may send a caller away for."""

_PARTS = rows(MAX_PARTS)
_ROWS = integer(0, MAX_PAIRS)
_ANSWERS = rows(MAX_PARTS)
_RETRY_AFTER = optional(real(MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S))
_MAX_ROWS = integer(1, MAX_PAIRS)
_UPDATES = optional(integer(0, MAX_UPDATES))
_KIND = choice(ErrorKind)
_MESSAGE = text(0, MAX_ERROR_CHARACTERS)


class TooManyRows(CallRefused):
    """A part has more rows than `max_rows`, which is what the node takes in one; nothing was done."""

    def __init__(self, message: str, *, max_rows: int) -> None:
        super().__init__(message)
        self.max_rows = max_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCall:
    """A trainer's wish of one expert: a part of a request.

    Attributes:
      uid: the expert.
      contact: the node that serves it.
      rows: int64 [n], the samples of the batch that it serves.
      slots: int64 [n], in which of its slots each of these samples has the expert.
      seen: of a backward call, how many updates the expert had taken in the forward pass, at this very node; None if it
        said no such thing.
      id: names it across retries.
      began: when this node was first asked, by trio's clock.
    """

    uid: str
    contact: Contact
    rows: Array
    slots: Array
    seen: int | None = None
    id: bytes = b""
    began: float = 0.0


RequestPart = tuple[Mapping[str, Any], slice, slice | Array]
"""A part as a node reads it, not checked yet: the description, as it travels; its pairs among those of the
request; and its rows of the inputs, a slice if they lie together, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A part that was computed.

    Attributes:
      updates: how many updates the expert has taken; None if its node says no such thing.
      tensors: the output, or the gradients of the differentiable inputs, each [rows, ...].
    """

    updates: int | None
    tensors: tuple[Array, ...]


Outcome = Answer | CallFailed
"""The end of a part."""


def index_of(rows_of_parts: Sequence[Array]) -> tuple[Array, Array]:
    """(the distinct rows of a batch that parts take, ascending; the index, int32 [pairs], into these)."""
    pairs = rows_of_parts[0] if len(rows_of_parts) == 1 else np.concatenate(rows_of_parts)
    is_taken = np.zeros(int(pairs.max(initial=-1)) + 1, bool)
    is_taken[pairs] = True
    place = np.cumsum(is_taken, dtype=np.int32)  # faster than `np.unique`, which sorts
    return np.flatnonzero(is_taken), place[pairs] - np.int32(1)


def request_of(
    calls: Sequence[ExpertCall],
    inputs: Sequence[Array],
    output_grads: Array | None,
    common: Mapping[str, Any],
    compression: Compression,
) -> tuple[Body, list[Outgoing]]:
    """Body and tensors of the request for calls of one node.

    Args:
      inputs: of the batch, each [batch, ...].
      output_grads: gradients of the experts' outputs, [batch, slots, ...]; None in a forward request.
      common: what the request says beside its parts.
    """
    # Keys in the order of canonical CBOR, in which they are encoded faster.
    parts: list[dict[str, Any]] = []
    for call in calls:
        parts.append({"id": call.id, "uid": call.uid, "rows": len(call.rows)})
        if call.seen is not None:
            parts[-1]["seen"] = call.seen
    body: dict[str, Any] = {"parts": parts}
    if compression is not Compression.NONE:
        body["compression"] = compression.value
    body |= common
    distinct, index = index_of([call.rows for call in calls])
    is_all = len(distinct) == len(inputs[0])
    tensors = [array if is_all else array[distinct] for array in inputs]
    if output_grads is not None:
        rows = np.concatenate([call.rows for call in calls])
        slots = np.concatenate([call.slots for call in calls])
        tensors.append(output_grads[rows, slots])
    return body, [index, *(as_outgoing(tensor, compression) for tensor in tensors)]


def is_finite(tensor: Array) -> bool:
    """True if all numbers of a tensor are finite; integers and truth values are."""
    # Counted, and not `isfinite(...).all()`, which takes several times as long for a few rows.
    return tensor.dtype.kind in "iub" or bool(np.count_nonzero(np.isfinite(tensor)) == tensor.size)


def parts_of_untrusted(request: Request) -> list[RequestPart]:
    """The parts of a request, as far as they can be told without knowing the experts. Raises RemoteProtocolError if it
    has none, or the index does not fit."""
    bodies = _PARTS.of_untrusted(request.body, "parts")
    if not bodies or not request.tensors:
        raise RemoteProtocolError("a request has parts, and the index as its first tensor")
    index, *inputs = request.tensors
    num_rows = len(inputs[0]) if inputs and inputs[0].ndim else 0
    told = [MAPPING.read_untrusted(body, f"part {number}") for number, body in enumerate(bodies)]
    sizes = [_ROWS.read_untrusted(body.get("rows"), f"rows of part {number}") for number, body in enumerate(told)]
    if index.dtype != np.int32 or index.shape != (sum(sizes),):
        expected = f"int32[{sum(sizes)}], one for each row of the parts"
        raise RemoteProtocolError(f"the index must be {expected}, got {index.dtype}{list(index.shape)}")
    # Seen as unsigned, a negative number is larger than any number of rows.
    if len(index) and not np.maximum.reduce(index.view(np.uint32)) < num_rows:
        raise RemoteProtocolError(f"the index must lie within the {num_rows} rows of the inputs")
    parts: list[RequestPart] = []
    start = 0
    follows = index[1:] == index[:-1] + 1  # the pair before it
    for body, size in zip(told, sizes, strict=True):
        stop = start + size
        rows: slice | Array = index[start:stop]
        if size and np.count_nonzero(follows[start : stop - 1]) == size - 1:
            rows = slice(int(index[start]), int(index[start]) + size)
        parts.append((body, slice(start, stop), rows))
        start = stop
    return parts


def answer_of(outcomes: Sequence[tuple[int, Outcome]], compression: Compression) -> Reply:
    """The partial, or the reply, with the outcomes of parts, by number; all answers have equally many tensors."""
    answers: list[dict[str, Any]] = []
    computed: list[Answer] = []
    for number, outcome in outcomes:
        if isinstance(outcome, Answer):
            answers.append({"part": number, "updates": outcome.updates})
            computed.append(outcome)
        else:
            answers.append({"part": number, "error": kind_of(outcome).value, "message": error_text(str(outcome))})
            if isinstance(outcome, PeerBusy) and outcome.retry_after_s is not None:
                wait_s = min(max(float(outcome.retry_after_s), MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
                answers[-1]["retry_after_s"] = wait_s
            elif isinstance(outcome, TooManyRows):
                answers[-1]["max_rows"] = outcome.max_rows
    columns = zip(*(answer.tensors for answer in computed), strict=True)
    tensors = tuple(as_outgoing(below_one_another(column), compression) for column in columns)
    return Reply(body={"answers": answers}, tensors=tensors)


def outcomes_of_untrusted(answer: Reply, expected_rows: Mapping[int, int]) -> list[tuple[int, Outcome]]:
    """The outcomes that a partial or a reply tells, by the parts' numbers; shapes of tensors are still to be checked.
    `expected_rows` has the rows of the parts that are not answered yet. Raises RemoteProtocolError if it says something
    of other parts, or not all tensors have a row for each pair."""
    left = dict(expected_rows)
    said: list[tuple[int, int, Mapping[str, Any]]] = []  # number, rows, what is said
    for body in _ANSWERS.of_untrusted(answer.body, "answers"):
        number = body.get("part") if isinstance(body, dict) else None
        if type(number) is not int or number not in left:
            raise RemoteProtocolError(f"expected the number of a part that waits for its answer, got {number!r:.80}")
        said.append((number, left.pop(number), cast(Mapping[str, Any], body)))
    tensors = [plain(tensor) for tensor in answer.tensors]
    total = sum(num_rows for _, num_rows, body in said if "error" not in body)
    if any(tensor.shape[:1] != (total,) for tensor in tensors):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise RemoteProtocolError(f"expected {total} rows in each tensor of an answer, got the shapes {shapes}")
    outcomes: list[tuple[int, Outcome]] = []
    start = 0
    for number, num_rows, body in said:
        if "error" in body:
            outcomes.append((number, _error_untrusted(body)))
        else:
            own = tuple(tensor[start : start + num_rows] for tensor in tensors)
            outcomes.append((number, Answer(updates=_UPDATES.of_untrusted(body, "updates"), tensors=own)))
            start += num_rows
    return outcomes


def _error_untrusted(body: Mapping[str, Any]) -> CallFailed:
    error = CALL_ERRORS[_KIND.of_untrusted(body, "error")](_MESSAGE.of_untrusted(body, "message"))
    if isinstance(error, PeerBusy):
        error.retry_after_s = _RETRY_AFTER.of_untrusted(body, "retry_after_s")
    elif isinstance(error, CallRefused) and "max_rows" in body:
        return TooManyRows(str(error), max_rows=_MAX_ROWS.of_untrusted(body, "max_rows"))
    return error


def below_one_another(arrays: Sequence[Array]) -> Array:
    """The rows of all arrays in one; a single array is used as it came, without a copy."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
