"""The event order of a real run: what a swarm did, one thing after another.

A recorder stands between trainers, nodes and their network, all in one process, and notes what happens in the order in
which it happens: a trainer reads the trunk, an expert has computed a call, a trainer has an answer, the trunk was
updated. `OrderRecorder.order` makes an `EventOrder` of it, from which the emulator computes what the swarm did.

    recorder = OrderRecorder(num_layers=2)
    node = open_swarm(..., testing=Seams(caller=recorder.caller(rpc)))
    place = open_swarm(..., testing=Seams(caller=recorder.caller(rpc, trainer=0)))
    trainer = Trainer(0, recorder.model(model, trainer=0), recorder.trunk(trunk, trainer=0), batches)
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import trio
from jaxtyping import PRNGKeyArray

from dmoe_jax.autodiff import Recording
from dmoe_jax.emulator.order import BACKWARD, FORWARD, STAGE, EventOrder, num_stages
from dmoe_jax.expert_calls import BACKWARD as BACKWARD_CALL
from dmoe_jax.expert_calls import FORWARD as FORWARD_CALL
from dmoe_jax.grid import parse_uid
from dmoe_jax.model import Model, Outcome
from dmoe_jax.trunk import SharedTrunk
from dmoe_jax.types import PyTree
from net.identity import Address, Contact, PeerId
from net.peer_health import PeerHealth
from net.rpc.base import Body, Caller, Handler, Reply, Request
from net.rpc.bulk import BulkTraffic
from net.wire.tensors import Outgoing, Tensor

_METHODS = {FORWARD_CALL: FORWARD, BACKWARD_CALL: BACKWARD}


@dataclass
class _Noted:
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
    _steps: dict[int, int] = field(default_factory=dict)  # steps that each trainer has begun
    _too_late: list[str] = field(default_factory=list)
    _answered: set[bytes] = field(default_factory=set)

    def caller(self, caller: Caller, *, trainer: int | None = None) -> Caller:
        """What a node, or the trainer of this number, is to call and serve through."""
        return cast(Caller, _RecordedCaller(self, caller, trainer))

    def model(self, model: Model, *, trainer: int) -> Model:
        """What this trainer is to train."""
        return _RecordedModel(self, model, trainer)

    def trunk(self, trunk: SharedTrunk, *, trainer: int) -> SharedTrunk:
        """What this trainer is to read and to update."""
        return _RecordedTrunk(self, trunk, trainer)

    def note_start(self, trainer: int) -> None:
        """The trainer has read the trunk."""
        self._steps[trainer] = self._steps.get(trainer, 0) + 1
        self._noted.append(_Noted(STAGE, trainer))

    def note_update(self, trainer: int) -> None:
        """The trainer's gradients were applied."""
        self._noted.append(_Noted(STAGE + num_stages(len(self.prefixes)) - 1, trainer))

    def note_placed(self, trainer: int, request_id: bytes) -> None:
        """The trainer calls an expert."""
        self._step_of[request_id] = trainer, self._steps.get(trainer, 0)

    def note_computed(self, kind: int, uid: str, request_id: bytes) -> None:
        """An expert has computed a call."""
        trainer, step = self._step_of[request_id]
        if step == self._steps.get(trainer, 0):
            self._noted.append(_Noted(kind, trainer, uid, request_id))
        elif kind == BACKWARD:  # a forward call that nobody waits for any more changes nothing
            self._too_late.append(f"expert {uid} learnt of trainer {trainer}'s step {step} after the end of that step")

    def note_answered(self, request_id: bytes) -> None:
        """The trainer has the answer."""
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
        noted = self._noted[: updates[-1] + 1]
        rows: list[tuple[int, int, int, int, int, bool, bool]] = []
        done: dict[int, int] = {}  # the last stage of each trainer
        for what in noted:
            layer = cell = 0
            if what.kind >= STAGE:
                wanted = what.kind - STAGE
            else:
                uid = parse_uid(what.uid)
                layer = self.prefixes.index(uid.prefix)
                cell = layer * int(np.prod(self.grid_size)) + int(np.ravel_multi_index(uid.coordinates, self.grid_size))
                wanted = layer if what.kind == FORWARD else last - 1 - layer
            first = 0 if wanted == 0 and what.kind >= STAGE else done.get(what.trainer, -1) + 1
            for stage in range(first, wanted + 1):
                rows.append((STAGE + stage, what.trainer, 0, 0, -1, True, True))
            done[what.trainer] = max(wanted, done.get(what.trainer, -1)) if first else wanted
            if what.kind < STAGE:
                answered = what.request_id in self._answered
                rows.append((what.kind, what.trainer, layer, 0, cell, answered, True))
        kind, trainer, layers, pair, expert, answers, computed = map(np.array, zip(*rows, strict=True))
        return EventOrder(
            kind=kind.astype(np.int32),
            trainer=trainer.astype(np.int32),
            layer=layers.astype(np.int32),
            pair=pair.astype(np.int32),
            expert=expert.astype(np.int32),
            answered=answers,
            computed=computed,
            num_trainers=num_trainers,
            num_layers=len(self.prefixes),
            num_pairs=num_pairs,
        )


class _RecordedCaller:
    """A `Caller` that tells a recorder of the expert calls that it places and serves.

    Each expert serves one call after another: a batch of several requests would be one update, which no order says.
    """

    def __init__(self, recorder: OrderRecorder, caller: Caller, trainer: int | None) -> None:
        self._recorder, self._caller, self._trainer = recorder, caller, trainer
        self._turns: dict[str, trio.Lock] = {}

    # All that a `Caller` has, by name: what only `__getattr__` knows is no member to Python 3.12's look at a protocol.
    @property
    def peer_id(self) -> PeerId:
        return self._caller.peer_id

    @property
    def address(self) -> Address | None:
        return self._caller.address

    @property
    def bulk(self) -> BulkTraffic:
        return self._caller.bulk

    @property
    def health(self) -> PeerHealth:
        return self._caller.health

    def moved_bytes(self, peer_id: PeerId) -> int:
        return self._caller.moved_bytes(peer_id)

    def remove_handler(self, method: str) -> None:
        self._caller.remove_handler(method)

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
        timeout_s: float,
        bulk_bytes: int = 0,
        on_partial: Callable[[Reply], None] | None = None,
        into: Tensor | None = None,
    ) -> Reply:
        """As `Caller.call`."""
        options: dict[str, Any] = {"timeout_s": timeout_s, "bulk_bytes": bulk_bytes, "into": into}
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
    """Those of a request's parts that this answer says were computed."""
    return [parts[said["part"]] for said in answer.body["answers"] if "error" not in said]


class _RecordedModel(Model):
    def __init__(self, recorder: OrderRecorder, model: Model, trainer: int) -> None:
        self._recorder, self._model, self._trainer = recorder, model, trainer
        self.name, self.unit = model.name, model.unit

    def init(self, key: PRNGKeyArray) -> PyTree:
        return self._model.init(key)

    def initial_state(self, batch: Any) -> PyTree:
        return self._model.initial_state(batch)

    def keys(self, batch: Any, *, seed: int, trainer: int, step: int) -> Any:
        return self._model.keys(batch, seed=seed, trainer=trainer, step=step)

    async def forward(self, run: Recording, params: PyTree, batch: Any, state: PyTree, keys: Any) -> Outcome:
        if run.differentiates:
            self._recorder.note_start(self._trainer)
        return await self._model.forward(run, params, batch, state, keys)


class _RecordedTrunk(SharedTrunk):
    """What a trainer sees of a trunk, with its updates noted. It has no state of its own."""

    def __init__(self, recorder: OrderRecorder, trunk: SharedTrunk, trainer: int) -> None:
        self._recorder, self._trunk, self._trainer = recorder, trunk, trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)

    # What a `Trunk` has, by name, for the reason above.
    @property
    def step(self) -> int:
        return self._trunk.step

    @step.setter
    def step(self, value: int) -> None:
        self._trunk.step = value

    @property
    def params(self) -> PyTree:
        return self._trunk.params

    @params.setter
    def params(self, value: PyTree) -> None:
        self._trunk.params = value

    def claim(self, num_steps: int) -> bool:
        return self._trunk.claim(num_steps)

    def release(self) -> None:
        self._trunk.release()

    async def apply(self, grads: PyTree, **options: Any) -> int:
        """As `SharedTrunk.apply`."""
        step = await self._trunk.apply(grads, **options)
        self._recorder.note_update(self._trainer)
        return step
