"""The event order of a real run: what a swarm did, one thing after another.

A recorder stands between trainers, nodes and their network, all in one process, and notes what happens in the order in
which it happens: a trainer reads the trunk, an expert has computed a call, a trainer has an answer, the trunk was
updated. `OrderRecorder.order` makes an `EventOrder` of it, from which the emulator computes what the swarm did.

    recorder = OrderRecorder(["layer0", "layer1"], grid_size=(4, 4))
    node = open_swarm(..., testing=Seams(caller=recorder.caller(rpc), identity=identity))
    place = open_swarm(..., testing=Seams(caller=recorder.caller(rpc, trainer=0), identity=identity))
    await Trainer(0, model, trunk, recorder.batches(batches, trainer=0)).run(num_steps, recorder.on_step)
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np
import trio

from dmoe_jax.directory.grid import parse_uid
from dmoe_jax.emulator.order import BACKWARD, FORWARD, STAGE, EventOrder, num_stages, order_of
from dmoe_jax.mixture.expert_calls import BACKWARD as BACKWARD_CALL
from dmoe_jax.mixture.expert_calls import FORWARD as FORWARD_CALL
from dmoe_jax.trainer import StepRecord
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.rpc.base import Body, Caller, Handler, Reply, Request
from dmoe_net.wire.tensors import Outgoing

_METHODS = {FORWARD_CALL: FORWARD, BACKWARD_CALL: BACKWARD}


class _Noted(NamedTuple):
    """One thing that happened."""

    kind: int
    trainer: int
    uid: str = ""
    request_id: bytes = b""


@dataclass
class OrderRecorder:
    """Notes what happens in a swarm that lives in one process.

    Args:
      prefixes: the names of the model's layers, in order.
      grid_size: of each.
    """

    prefixes: Sequence[str]
    grid_size: tuple[int, ...]
    _noted: list[_Noted] = field(default_factory=list)
    _step_of: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # (trainer, its step), of each request
    _steps: Counter[int] = field(default_factory=Counter)  # steps that each trainer has begun
    _too_late: list[str] = field(default_factory=list)
    _answered: set[bytes] = field(default_factory=set)

    def caller(self, caller: Caller, *, trainer: int | None = None) -> Caller:
        """The caller through which a node, or the trainer of this number, is to call and to serve."""
        return cast(Caller, _RecordedCaller(self, caller, trainer))

    def batches(self, batches: Iterable[Any], *, trainer: int) -> Iterator[Any]:
        """The batches that this trainer is to read: as it takes one, it reads the trunk."""
        for batch in batches:
            self._steps[trainer] += 1
            self._noted.append(_Noted(STAGE, trainer))
            yield batch

    def on_step(self, record: StepRecord) -> None:
        """Note that a trainer's gradients were applied."""
        self._noted.append(_Noted(STAGE + num_stages(len(self.prefixes)) - 1, record.trainer))

    def note_placed(self, trainer: int, request_id: bytes) -> None:
        """Note that a trainer calls an expert."""
        self._step_of[request_id] = trainer, self._steps[trainer]

    def note_computed(self, kind: int, uid: str, request_id: bytes) -> None:
        """Note that an expert has computed a call."""
        trainer, step = self._step_of[request_id]
        if step == self._steps[trainer]:
            self._noted.append(_Noted(kind, trainer, uid, request_id))
        elif kind == BACKWARD:  # a forward call that nobody waits for any more changes nothing
            self._too_late.append(f"expert {uid} learnt of trainer {trainer}'s step {step} after the end of that step")

    def note_answered(self, request_id: bytes) -> None:
        """Note that a trainer has an answer."""
        self._answered.add(request_id)

    def order(self, *, num_trainers: int, num_pairs: int) -> EventOrder:
        """All that was noted until now, up to the last update of the trunk.

        Args:
          num_trainers: trainers of the swarm. num_pairs: samples of a batch times slots.

        Raises:
          ValueError: nothing was applied, or an expert computed a backward call after its trainer had gone on to the
            next step, for which an order has no words: trainers must wait longer for their calls.
        """
        if self._too_late:
            raise ValueError(f"{self._too_late[0]}; {len(self._too_late)} such calls: let trainers wait longer")
        last = num_stages(len(self.prefixes)) - 1
        updates = [place for place, what in enumerate(self._noted) if what.kind == STAGE + last]
        if not updates:
            raise ValueError("the recorder has seen no update of a trunk")
        rows: list[tuple[int, ...]] = []
        done: dict[int, int] = {}  # the last stage of each trainer
        for kind, trainer, name, request_id in self._noted[: updates[-1] + 1]:
            layer = cell = 0
            if kind >= STAGE:
                wanted = kind - STAGE
            else:
                uid = parse_uid(name)
                layer = self.prefixes.index(uid.prefix)
                cell = layer * math.prod(self.grid_size) + int(np.ravel_multi_index(uid.coordinates, self.grid_size))
                wanted = layer if kind == FORWARD else last - 1 - layer
            first = 0 if kind == STAGE else done.get(trainer, -1) + 1
            rows += [(STAGE + stage, trainer, 0, 0, -1, 1, 1) for stage in range(first, wanted + 1)]
            done[trainer] = max(wanted, done.get(trainer, -1)) if first else wanted
            if kind < STAGE:
                rows.append((kind, trainer, layer, 0, cell, request_id in self._answered, 1))
        return order_of(np.array(rows), num_trainers=num_trainers, num_layers=len(self.prefixes), num_pairs=num_pairs)


class _RecordedCaller:
    """A `Caller` that tells a recorder of the expert calls that it places and serves.

    Each expert serves one call after another: a batch of several requests would be one update, which no order says.
    """

    def __init__(self, recorder: OrderRecorder, caller: Caller, trainer: int | None) -> None:
        self._recorder, self._caller, self._trainer = recorder, caller, trainer
        self._turns: dict[str, trio.Lock] = {}
        self.peer_id, self.address = caller.peer_id, caller.address
        self.bulk, self.health = caller.bulk, caller.health
        self.moved_bytes, self.remove_handler = caller.moved_bytes, caller.remove_handler
        self.is_reached, self.reach = caller.is_reached, caller.reach

    def add_handler(self, method: str, handler: Handler, *, max_concurrent: int = 64) -> None:
        """As `Caller.add_handler`."""
        kind = _METHODS.get(method)

        async def recorded(request: Request) -> Reply:
            if kind is None:
                return await handler(request)
            parts = request.body["parts"]

            def note(answer: Reply) -> None:
                for part in _computed(parts, answer):
                    self._recorder.note_computed(kind, part["uid"], part["id"])

            def send_partial(answer: Reply) -> bool:
                is_sent = request.send_partial is not None and request.send_partial(answer)
                if is_sent:
                    note(answer)
                return is_sent

            async with AsyncExitStack() as stack:
                for uid in sorted({part["uid"] for part in parts}):  # in one order, so that no two wait for each other
                    await stack.enter_async_context(self._turns.setdefault(uid, trio.Lock()))
                reply = await handler(replace(request, send_partial=send_partial))
                note(reply)
            return reply

        self._caller.add_handler(method, recorded, max_concurrent=max_concurrent)

    async def call(
        self,
        target: Contact | Address | PeerId,
        method: str,
        body: Body,
        tensors: Sequence[Outgoing] = (),
        *,
        on_partial: Callable[[Reply], None] | None = None,
        **options: Any,
    ) -> Reply:
        """As `Caller.call`."""
        if method not in _METHODS or self._trainer is None:
            return await self._caller.call(target, method, body, tensors, on_partial=on_partial, **options)
        parts = body["parts"]
        for part in parts:
            self._recorder.note_placed(self._trainer, part["id"])

        def note(answer: Reply) -> None:
            for part in _computed(parts, answer):
                self._recorder.note_answered(part["id"])

        def take(answer: Reply) -> None:
            note(answer)
            if on_partial is not None:
                on_partial(answer)

        reply = await self._caller.call(
            target, method, body, tensors, on_partial=None if on_partial is None else take, **options
        )
        note(reply)
        return reply


def _computed(parts: Sequence[Mapping[str, Any]], answer: Reply) -> list[Mapping[str, Any]]:
    """The parts of a request that this answer says were computed."""
    return [parts[said["part"]] for said in answer.body["answers"] if "error" not in said]
