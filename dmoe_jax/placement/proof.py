"""Making sure that a node computes an expert, whatever it announces and says of itself."""

import numpy as np

from dmoe_jax.experts.base import Expert
from dmoe_jax.mixture.expert_calls import FORWARD, Answer, ExpertCall, outcomes_of_untrusted, request_of
from dmoe_net.errors import NetError
from dmoe_net.identity import Contact
from dmoe_net.rpc.base import Caller
from dmoe_net.wire.compression import Compression

_TIMEOUT_S = 10.0


async def computes(caller: Caller, contact: Contact, uid: str, expert: Expert) -> bool:
    """Return True if a node answers a forward call of an expert, for one row of zeros, with an output of its shape."""
    inputs = [np.zeros((1, *spec.shape), spec.dtype) for spec in expert.inputs]
    one = np.zeros(1, np.int64)
    call = ExpertCall(uid=uid, contact=contact, rows=one, slots=one)
    body, tensors = request_of([call], inputs, None, {}, Compression.NONE)
    try:
        reply = await caller.call(contact, FORWARD, body, tensors, timeout_s=_TIMEOUT_S)
        ((_, outcome),) = outcomes_of_untrusted(reply, {0: 1})
    except (NetError, ValueError):  # ValueError: no outcome at all
        return False
    return isinstance(outcome, Answer) and [each.shape for each in outcome.tensors] == [(1, *expert.output.shape)]
