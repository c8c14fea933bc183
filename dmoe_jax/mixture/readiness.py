"""A look before a run that a layer has experts and that they are of our kind, so that it does not begin in vain."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import trio

from dmoe_jax.directory.grid import Coordinates, ExpertUid
from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.mixture.fan_out import ExpertCaller
from dmoe_net.errors import (
    CallFailed,
    NetError,
    NoQuorum,
    PeerUnavailable,
    RemoteProtocolError,
    VersionMismatch,
    seconds_of,
)
from dmoe_net.identity import Contact
from dmoe_net.meaning import MAX_MEANING_CHARACTERS, contradiction
from dmoe_net.rpc.base import Body
from dmoe_net.wire.fields import integer
from dmoe_net.wire.versions import CALLS, versions_differ

_log = logging.getLogger(__name__)

_ASK_PERIOD_S = 0.5
"""Seconds between two looks for experts while there are none."""
_INFO_TIMEOUT_S = 3.0
"""Seconds for an expert to say what it is."""
_MOST_ASKED = 64
"""Most nodes that are asked what their experts are; further ones are taken to be alive and of our kind."""

_MAX_ROWS = integer(1, 2**31)


class ExpertMismatch(ValueError):
    """The swarm's experts take or return other tensors than the model's, or compute otherwise. `theirs` are the inputs
    and the output of the swarm's expert, as `expert.info` gives them, `ours` those of the model's."""

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
    """Ask an expert of each node what it is, for `RemoteMixture.check`; returns the number of experts that will do."""
    started = trio.current_time()
    living: Mapping[Coordinates, Contact] = {}
    failures: list[NetError] = []
    said = 0
    with trio.move_on_after(timeout_s):
        while True:
            living = await caller.directory.living(prefix, grid_size)
            wrong = await _ask_nodes(expert, prefix, living, caller)
            count = sum(contact not in wrong for contact in living.values())
            for why in wrong.values():
                if count:
                    _log.warning("experts of %r will not be used: %s", prefix, why)
                elif isinstance(why, ExpertMismatch | VersionMismatch):
                    raise why
                else:  # a node that was just killed is listed for a while longer
                    failures.append(why)
            if count:
                say(f"{prefix}: {count} of {math.prod(grid_size)} experts alive")
                return count
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
    served = await caller.directory.served_prefixes()
    instead = f"this swarm serves {', '.join(map(repr, served))}" if served else "this swarm lists no experts at all"
    clocks = f"; {doubts}" if (doubts := caller.directory.clock_doubts()) else ""
    raise NoQuorum(f"no expert of {prefix!r} was announced within {seconds_of(timeout_s)}; {instead}{clocks}")


async def _ask_nodes(
    expert: Expert, prefix: str, living: Mapping[Coordinates, Contact], caller: ExpertCaller
) -> dict[Contact, ExpertMismatch | NetError]:
    """Ask one expert of each node what it is, and note how many rows each node takes in a call. Return the nodes that
    do not answer, or do not fit, with the reasons."""
    wrong: dict[Contact, ExpertMismatch | NetError] = {}

    async def ask(uid: str, contact: Contact) -> None:
        try:
            reply = await caller.rpc.call(contact, "expert.info", {"uid": uid}, timeout_s=_INFO_TIMEOUT_S)
            _compare(expert, reply.body, f"expert {uid} at {contact}")
            caller.most_rows[contact.peer_id] = _MAX_ROWS.of_untrusted(reply.body, "max_rows")
        except (ExpertMismatch, PeerUnavailable, CallFailed, RemoteProtocolError) as error:
            wrong[contact] = error

    first = {contact: str(ExpertUid(prefix, coordinates)) for coordinates, contact in reversed([*living.items()])}
    async with trio.open_nursery() as nursery:
        for contact, uid in list(first.items())[:_MOST_ASKED]:
            nursery.start_soon(ask, uid, contact)
    return wrong


def _compare(expert: Expert, info: Body, who: str) -> None:
    if info.get("calls") != CALLS:
        raise VersionMismatch(f"{who} {versions_differ('calls and records', info.get('calls'), CALLS)}")
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
    meaning = str(info.get("meaning") or "")[:MAX_MEANING_CHARACTERS]
    if facts := contradiction(meaning, expert.meaning):
        raise ExpertMismatch(
            f"the experts of this swarm compute otherwise: {who} has {facts[0]}, this model needs {facts[1]}",
            theirs=theirs,
            ours=ours,
        )


def _described(spec: Any) -> str:
    """Shape and type of a stranger's specification; names do not matter."""
    if not isinstance(spec, Mapping):
        return repr(spec)[:80]
    rest = "" if spec.get("differentiable") else " (not differentiable)"
    return f"{spec.get('dtype')}{spec.get('shape')}"[:80] + rest
