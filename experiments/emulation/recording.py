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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, cast

import numpy as np
import trio

from dmoe_jax.directory.grid import parse_uid
from dmoe_jax.emulator.order import BACKWARD, FORWARD, STAGE, EventOrder, num_stages, order_of
from dmoe_jax.mixture.expert_calls import BACKWARD as BACKWARD_CALL
from dmoe_jax.mixture.expert_calls import FORWARD as FORWARD_CALL
from dmoe_jax.trainer import StepRecord
from dmoe_net.rpc.base import Body, Caller, Handler, Reply, Request

Part = Mapping[str, Any]
"""A part of a request: the call of one expert."""

_METHODS = {FORWARD_CALL: FORWARD, BACKWARD_CALL: BACKWARD}


class OrderRecorder:
    """Notes what happens in a swarm that lives in one process.

    Args:
      prefixes: the names of the model's layers, in order.
      grid_size: of each.
    """

    def __init__(self, prefixes: Sequence[str], grid_size: tuple[int, ...]) -> None:
        self._prefixes, self._grid_size = prefixes, grid_size
        self._last = num_stages(len(prefixes)) - 1
        self._noted: list[tuple[int, int, str, bytes]] = []  # kind of event, trainer, uid, request
        self._step_of: dict[bytes, tuple[int, int]] = {}  # (trainer, its step), of each request
        self._steps: Counter[int] = Counter()  # steps that each trainer has begun
        self._too_late: list[str] = []
        self._answered: set[bytes] = set()

    def caller(self, caller: Caller, *, trainer: int | None = None) -> Caller:
        """The caller through which a node, or the trainer of this number, is to call and to serve."""
        return cast(Caller, _RecordedCaller(self, caller, trainer))

    def batches(self, batches: Iterable[Any], *, trainer: int) -> Iterator[Any]:
        """The batches that this trainer is to read: as it takes one, it reads the trunk."""
        for batch in batches:
            self._steps[trainer] += 1
            self._noted.append((STAGE, trainer, "", b""))
            yield batch

    def on_step(self, record: StepRecord) -> None:
        """Note that a trainer's gradients were applied."""
        self._noted.append((STAGE + self._last, record.trainer, "", b""))

    def note_placed(self, trainer: int, parts: Sequence[Part]) -> None:
        """Note that a trainer calls experts."""
        self._step_of.update((part["id"], (trainer, self._steps[trainer])) for part in parts)

    def note_computed(self, kind: int, parts: Sequence[Part], answer: Reply) -> None:
        """Note that experts have computed those calls of a request that this answer is for."""
        for part in _computed(parts, answer):
            uid, (trainer, step) = part["uid"], self._step_of[part["id"]]
            if step == self._steps[trainer]:
                self._noted.append((kind, trainer, uid, part["id"]))
            elif kind == BACKWARD:  # a forward call that nobody waits for any more changes nothing
                self._too_late.append(f"expert {uid} learnt of trainer {trainer}'s step {step} after its end")

    def note_answered(self, parts: Sequence[Part], answer: Reply) -> None:
        """Note that a trainer has this answer."""
        self._answered.update(part["id"] for part in _computed(parts, answer))

    def order(self, *, num_trainers: int, num_pairs: int) -> EventOrder:
        """All that was noted until now, up to the last update of the trunk.

        Args: num_pairs: samples of a batch times slots.

        Raises:
          ValueError: nothing was applied, or an expert computed a backward call after its trainer had gone on to the
            next step, for which an order has no words: trainers must wait longer for their calls.
        """
        if self._too_late:
            raise ValueError(f"{self._too_late[0]}; {len(self._too_late)} such calls: let trainers wait longer")
        updates = [place for place, (kind, *_) in enumerate(self._noted) if kind == STAGE + self._last]
        if not updates:
            raise ValueError("the recorder has seen no update of a trunk")
        rows: list[tuple[int, ...]] = []
        done: dict[int, int] = {}  # the last stage of each trainer
        for kind, trainer, name, request_id in self._noted[: updates[-1] + 1]:
            if kind >= STAGE:
                layer, wanted = 0, kind - STAGE
            else:
                layer = self._prefixes.index(parse_uid(name).prefix)
                wanted = layer if kind == FORWARD else self._last - 1 - layer
            first = 0 if kind == STAGE else done.get(trainer, -1) + 1
            rows += [(STAGE + stage, trainer, 0, 0, -1, 1, 1) for stage in range(first, wanted + 1)]
            done[trainer] = max(wanted, done.get(trainer, -1)) if first else wanted
            if kind < STAGE:
                own = int(np.ravel_multi_index(parse_uid(name).coordinates, self._grid_size))
                cell = layer * math.prod(self._grid_size) + own
                rows.append((kind, trainer, layer, 0, cell, request_id in self._answered, 1))
        num_layers = len(self._prefixes)
        return order_of(np.array(rows), num_trainers=num_trainers, num_layers=num_layers, num_pairs=num_pairs)


class _RecordedCaller:
    """A `Caller` that tells a recorder of the expert calls that it places and serves.

    Each expert serves one call after another: a batch of several requests would be one update, which no order says.
    """

    def __init__(self, recorder: OrderRecorder, caller: Caller, trainer: int | None) -> None:
        self._recorder, self._caller, self._trainer = recorder, caller, trainer
        self._turns: dict[str, trio.Lock] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._caller, name)

    def add_handler(self, method: str, handler: Handler, *, max_concurrent: int = 64) -> None:
        """As `Caller.add_handler`."""
        kind = _METHODS.get(method, FORWARD)

        async def recorded(request: Request) -> Reply:
            parts = request.body["parts"]

            def send_partial(answer: Reply) -> bool:
                is_sent = request.send_partial is not None and request.send_partial(answer)
                if is_sent:
                    self._recorder.note_computed(kind, parts, answer)
                return is_sent

            async with AsyncExitStack() as stack:
                for uid in sorted({part["uid"] for part in parts}):  # in one order, so that no two wait for each other
                    await stack.enter_async_context(self._turns.setdefault(uid, trio.Lock()))
                reply = await handler(replace(request, send_partial=send_partial))
                self._recorder.note_computed(kind, parts, reply)
            return reply

        self._caller.add_handler(method, recorded if method in _METHODS else handler, max_concurrent=max_concurrent)

    async def call(self, target: Any, method: str, body: Body, tensors: Any = (), **options: Any) -> Reply:
        """As `Caller.call`."""
        if method not in _METHODS or self._trainer is None:
            return await self._caller.call(target, method, body, tensors, **options)
        parts = body["parts"]
        on_partial: Any = options.pop("on_partial", None)
        self._recorder.note_placed(self._trainer, parts)

        def take(answer: Reply) -> None:
            self._recorder.note_answered(parts, answer)
            on_partial(answer)

        heard = None if on_partial is None else take
        reply = await self._caller.call(target, method, body, tensors, on_partial=heard, **options)
        self._recorder.note_answered(parts, reply)
        return reply


def _computed(parts: Sequence[Part], answer: Reply) -> list[Part]:
    """The parts of a request that this answer says were computed."""
    return [parts[said["part"]] for said in answer.body["answers"] if "error" not in said]
