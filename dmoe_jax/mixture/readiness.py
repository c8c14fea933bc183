"""Are there experts for a layer, and are they of our kind? Asked before a run, so that it does not begin in vain."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import trio

from dmoe_jax.directory import ExpertDirectory
from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.grid import ExpertUid
from dmoe_jax.mixture.fan_out import ExpertCaller
from dmoe_jax.routing.beam_search import Coordinates
from net.errors import CallFailed, NetError, NoQuorum, PeerUnavailable, RemoteProtocolError, seconds_of
from net.identity import Contact
from net.rpc.base import Body

_ASK_PERIOD_S = 0.5
"""Between two looks for experts while there are none."""

_INFO_TIMEOUT_S = 3.0
"""For an expert to say what it is; then the next one is asked."""

_TOLERABLE_SKEW_S = 3.0
"""Clocks that differ by more are worth a word when nothing is found."""


class ExpertMismatch(ValueError):
    """The swarm's experts take or return other tensors than the model's.

    Attributes:
      theirs: the inputs and the output of the swarm's expert, as `expert.info` gives them.
      ours: those of the model's.
    """

    def __init__(self, message: str, *, theirs: list[Any], ours: list[TensorSpec]) -> None:
        super().__init__(message)
        self.theirs = theirs
        self.ours = ours


async def check_experts(
    expert: Expert,
    prefix: str,
    grid_size: tuple[int, ...],
    caller: ExpertCaller,
    *,
    timeout_s: float,
    say: Callable[[str], None],
) -> int:
    """What `RemoteMixture.check` does: compare the first expert that answers with ours; how many experts are alive."""
    started = trio.current_time()
    living: Mapping[Coordinates, Contact] = {}
    failures: list[NetError] = []
    said = 0
    with trio.move_on_after(timeout_s):
        while True:
            living = await caller.directory.living(prefix, grid_size)
            for coordinates, contact in living.items():
                body = {"uid": str(ExpertUid(prefix, coordinates))}
                try:
                    reply = await caller.rpc.call(contact, "expert.info", body, timeout_s=_INFO_TIMEOUT_S)
                except (PeerUnavailable, CallFailed, RemoteProtocolError) as error:
                    # A node that was just killed is listed for a while longer.
                    failures.append(error)
                else:
                    _compare(expert, reply.body, f"expert {body['uid']} at {contact}")
                    say(f"{prefix}: {len(living)} of {math.prod(grid_size)} experts alive")
                    return len(living)
            waited_s = int(trio.current_time() - started)
            if waited_s > said:
                said = waited_s
                say(f"waiting for experts of {prefix!r} ({waited_s} s)")
            await trio.sleep(_ASK_PERIOD_S)
    if failures:
        raise NoQuorum(
            f"experts of {prefix!r} are announced, but none answered within {seconds_of(timeout_s)}; "
            f"the last one: {failures[-1]}"
        )
    raise NoQuorum(await _nobody(prefix, caller.directory, timeout_s))


async def _nobody(prefix: str, directory: ExpertDirectory, timeout_s: float) -> str:
    served = await directory.served_prefixes()
    instead = f"this swarm serves {', '.join(map(repr, served))}" if served else "this swarm lists no experts at all"
    # Announcements carry absolute times: to a clock that is fast by more than their life they are all over.
    skew_s = directory.clock_skew_s
    clocks = f"; the swarm's clock and this one differ by {skew_s:+.0f} s" if abs(skew_s) > _TOLERABLE_SKEW_S else ""
    return f"no expert of {prefix!r} was announced within {seconds_of(timeout_s)}; {instead}{clocks}"


def _compare(expert: Expert, info: Body, who: str) -> None:
    ours = [*expert.inputs, expert.output]
    inputs = info.get("inputs")
    theirs = [*(inputs if isinstance(inputs, list) else []), info.get("output")]
    wanted = [_described(asdict(spec) | {"shape": list(spec.shape)}) for spec in ours]
    got = [_described(spec) for spec in theirs]
    if got != wanted:
        raise ExpertMismatch(
            f"the experts of this swarm have other shapes: {who} is a {str(info.get('kind'))[:80]} with "
            f"{', '.join(got)}, this model needs {', '.join(wanted)}",
            theirs=theirs,
            ours=ours,
        )


def _described(spec: Any) -> str:
    """Shape and type of what a stranger sent. Names do not matter: each side may call its inputs what it likes."""
    if not isinstance(spec, Mapping):
        return repr(spec)[:80]
    rest = "" if spec.get("differentiable") else " (not differentiable)"
    return f"{spec.get('dtype')}{spec.get('shape')}"[:80] + rest
