"""Asynchronous trainers of one model whose experts are elsewhere.

Several trainers run as tasks of one process, each on its own part of the data with its own state. A trainer takes the
trunk's parameters as they are, computes loss and gradients (most of the time it waits for experts, while the others
compute), and applies its gradient to the parameters as they are *then*: in between, others may have stepped. That
staleness is the price for never waiting for each other (Learning@home section 3.3); the optimiser is told of it
(`scale_by_staleness`). The experts learn in the backward pass, at their own nodes, in the same way.

A step that fails (no quorum, the swarm unreachable) is dropped and counted, and leaves the trainer's state as it was.

The trunk may lie on several devices (`dmoe_jax.mesh`). A trainer then puts the rows of its batches where the trunk is,
and its segments compute on all of them; rows for remote experts come to the host, and their answers from it. If the
devices belong to several processes, one trainer runs in each, with the same batches: together they make each step, or
lose it, and each asks experts for rows of its own (`dmoe_jax.mixture.rows`). A step is not cancelled halfway; whoever
is cancelled ends the others' loops, too, before the next one.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import jax
import numpy as np
import optax
import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.arrays import all_finite as every_number_finite
from dmoe_jax.autodiff import Recording, Value, value_and_grad
from dmoe_jax.data.positions import Position, positioned
from dmoe_jax.machine.device import Device
from dmoe_jax.mesh.agreement import steps_alike
from dmoe_jax.mesh.layout import MeshLike, laid_out, rows_like
from dmoe_jax.mesh.shards import check_on_all_processes, spans_processes, tree_spans_processes
from dmoe_jax.model import Batch, Evaluation, Model, Outcome, State
from dmoe_jax.trunk import SharedTrunk
from dmoe_net.averaging.replica import ReplicaLost
from dmoe_net.errors import NetError

MAX_NOT_FINITE = 20
"""Steps of one trainer in a row that may come out as NaN or infinity. One bad batch, or an expert that recovers, makes
fewer; parameters that are beyond help would lose steps for ever."""


class EndOfData(Exception):
    """A trainer's batches have come to their end."""


@runtime_checkable
class Trunk(Protocol):
    """Place where trainers read parameters and bring gradients, such as a `SharedTrunk`; checkpoints hold its state."""

    @property
    def step(self) -> int: ...
    @property
    def params(self) -> PyTree: ...
    @property
    def state(self) -> PyTree: ...
    async def apply(
        self, grads: PyTree, *, samples: int, read_at: int, read_params: PyTree, check: Callable[[], None]
    ) -> int: ...
    async def snapshot(self) -> tuple[int, PyTree]: ...
    def facts(self) -> dict[str, Any]: ...
    def restore(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None: ...


AnyTrunk = TypeVar("AnyTrunk", bound=Trunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step."""

    step: int
    """Number of the trunk update, from 1."""
    trainer: int
    """Index of the trainer."""
    loss: float
    """Reported loss of the batch."""
    items: int
    """Samples or tokens in the batch."""
    staleness: int
    """Trunk updates by others between this step's reading and writing of the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """Time that a trainer spent on a step: from the batch at hand to its gradient applied or gathered."""

    trainer: int
    began: float  # seconds of trio's clock, as the next
    ended: float
    outcome: str
    """Name of the error with which the step was lost; "ok" if it was not."""


OnStep = Callable[[StepRecord], None]
OnLost = Callable[[int, Exception], None]


def unheard(*told: Any) -> None:
    """Do nothing: for callbacks of callers who do not listen."""


class Trainer(Generic[Batch, State]):
    """One asynchronous trainer: its batches, and the state that its next batch begins with.

    Args:
      index: number of the trainer in its process, whose trainers share `model` and `trunk`.
      batches: this trainer's data; any iterator of what the model's `forward` understands, with a position of its own
        or without: see `data.positions`.
      seed: the run's. All chance of a step follows from it, the trainer's number and its place in the data.
    """

    def __init__(
        self, index: int, model: Model[Batch, State], trunk: Trunk, batches: Iterator[Batch], *, seed: int = 0
    ) -> None:
        self._index = index
        self._model = model
        self._trunk = trunk
        self._batches = positioned(batches)
        self._position = self._batches.position
        self._seed = seed
        self._lost_in_a_row = self._not_finite_in_a_row = 0
        self._loss_and_grads = loss_and_grads(model)
        self._placed = rows_like(trunk.params)
        self._alike = steps_alike(trunk.params)
        self.state: State | None = None
        """State that the next batch begins with; None before the first step."""
        self.on_span: Callable[[StepSpan], None] = lambda span: None
        """Called with each step that has ended, well or not. One that is cancelled has no end."""

    @property
    def position(self) -> Position:
        """Position in the data behind the last batch whose step has ended, in JSON: with `state`, all there is to save.

        A batch that a step is at work on is read again by whoever goes on from here.
        """
        return self._position

    def seek(self, position: Position) -> None:
        """Make the batch behind a position the next one.

        Raises:
          ValueError: the position is of other batches, or they end before it.
        """
        self._batches.seek(position)
        self._position = self._batches.position

    async def step(self) -> StepRecord:
        """Take one step. If cancelled, the trunk is untouched or stepped; experts may have learnt already.

        Raises:
          NetError: the swarm could not carry the step; the trainer can go on with the next one.
          ReplicaLost: another process that holds a part of the trunk is gone, or was stopped.
          FloatingPointError: the loss or a gradient is not finite; the trunk is untouched.
          EndOfData: there is no further batch.
          ValueError: the processes that hold the trunk read different batches.
        """
        number = self._batches.number
        if self._alike is None:
            return await self._noted_step(number, self._next_batch())
        with self._alike.step():
            return await self._noted_step(number, await self._alike.agreed(self._next_batch, (EndOfData,)))

    async def _noted_step(self, number: int, batch: Batch) -> StepRecord:
        batch, began = self._placed(batch), trio.current_time()
        try:
            record = await self._step(number, batch)
        except (NetError, FloatingPointError) as error:
            self._note_end(began, type(error).__name__)
            raise
        self._note_end(began, "ok")
        return record

    async def _step(self, number: int, batch: Batch) -> StepRecord:
        keys = self._model.keys(batch, seed=self._seed, trainer=self._index, step=number)
        # What a step leaves behind lies somewhere already: a first state elsewhere would be compiled for once more.
        state = self._placed(self._model.initial_state(batch)) if self.state is None else self.state
        read_at, params = self._trunk.step, self._trunk.params
        (_, outcome), grads = await self._loss_and_grads(params, batch, state, keys)
        # Begun here, as all programs of a step: see `SharedTrunk.apply`.
        loss, items, are_finite = math.nan, int(outcome.items), _all_finite(grads)

        def check() -> None:  # waits for XLA: on the device, and not on the event loop
            nonlocal loss
            loss = float(cast(Any, outcome.loss if outcome.reported is None else outcome.reported))
            if not (np.isfinite(float(cast(Any, outcome.loss))) and are_finite):
                raise FloatingPointError(f"trainer {self._index}: {_not_finite(outcome.loss, grads)}")

        step = await self._trunk.apply(grads, samples=items, read_at=read_at, read_params=params, check=check)
        self.state = outcome.state
        return StepRecord(step=step, trainer=self._index, loss=loss, items=items, staleness=step - 1 - read_at)

    def _note_end(self, began: float, outcome: str) -> None:
        self._position = self._batches.position
        self.on_span(StepSpan(trainer=self._index, began=began, ended=trio.current_time(), outcome=outcome))

    async def attempt(self, on_lost: OnLost) -> StepRecord | None:
        """Take one step as `step` does, or tell `on_lost` of its error and return None.

        Raises:
          FloatingPointError: so many steps in a row were not finite that the model is beyond help.
          RouterError: the router's scores are not numbers. EndOfData: there is no further batch.
          ReplicaLost: as of `step`.
        """
        try:
            record = await self.step()
        except ReplicaLost:
            raise
        except (NetError, FloatingPointError) as error:
            self._lost_in_a_row += 1
            self._not_finite_in_a_row = self._not_finite_in_a_row + 1 if isinstance(error, FloatingPointError) else 0
            if self._not_finite_in_a_row > MAX_NOT_FINITE:
                raise
            on_lost(self._index, error)
            return None
        self._lost_in_a_row = self._not_finite_in_a_row = 0
        return record

    async def run(self, num_steps: int, on_step: OnStep = unheard, on_lost: OnLost = unheard) -> None:
        """Step until the trunk has `num_steps` updates, other trainers are making the last of them, or the data ends.

        Args:
          on_step: called after each step of this trainer.
          on_lost: called with the trainer and the error of a step that was dropped. A trainer that loses steps waits
            0.1 s times the losses in a row (5 s at most).

        Raises:
          FloatingPointError, RouterError: as of `attempt`.
        """
        trunk = self._trunk
        assert isinstance(trunk, SharedTrunk), "updates are claimed of a trunk of this process"
        self._lost_in_a_row = self._not_finite_in_a_row = 0
        while trunk.claim(num_steps):
            try:
                record = await self.attempt(on_lost)
            except EndOfData:
                return
            finally:
                trunk.release()
            if record is not None:
                on_step(record)
            else:
                with trio.CancelScope(shield=self._alike is not None):
                    await trio.sleep(min(5.0, 0.1 * self._lost_in_a_row))

    def _next_batch(self) -> Batch:
        try:
            return next(self._batches)
        except StopIteration:
            raise EndOfData(f"trainer {self._index} has read its last batch, number {self._batches.number}") from None


def loss_and_grads(model: Model[Batch, State]) -> Callable[..., Any]:
    """async (params, batch, state, keys) -> ((loss, Outcome), gradients of the parameters) of this model."""

    async def forward(
        run: Recording, params: PyTree, batch: Batch, state: State, keys: PyTree
    ) -> tuple[Value, Outcome]:
        outcome = await model.forward(run, params, batch, state, keys)
        return outcome.loss, outcome

    return value_and_grad(forward, has_aux=True)


_all_finite = jax.jit(every_number_finite)


def _not_finite(loss: Any, grads: PyTree) -> str:
    """A sentence that names the loss, or the first gradient, that is not finite."""
    if not np.isfinite(float(loss)):
        return f"the loss is {float(loss)}"
    named = jax.tree_util.tree_leaves_with_path(grads)

    def is_finite(leaf: Any) -> bool:
        # From the host: what is begun here on several devices might be begun on some of them after a program of a step.
        # Of several processes each has one trainer, which begins nothing else meanwhile.
        return bool(_all_finite(leaf if spans_processes(leaf) else np.asarray(leaf)))

    names = [jax.tree_util.keystr(at) or "the parameters" for at, leaf in named if not is_finite(leaf)]
    more = f" and of {len(names) - 1} more" if names[1:] else ""
    return f"the loss is {float(loss):g}, but the gradient of {names[0]}{more} is not finite"


def iterators_of(batches: Any) -> list[Iterator[Any]]:
    """One iterator of batches for each trainer, from a sequence of them or a single one."""
    several = list(batches) if isinstance(batches, Sequence) else [batches]
    if not several:
        raise ValueError("there must be at least one iterator of batches, one for each trainer; got none")
    for number, each in enumerate(several):
        if not hasattr(each, "__next__"):
            raise ValueError(
                f"batches are an iterator for each trainer, got {type(each).__name__} for trainer {number}: give "
                "[iter(batches)] for one trainer with a list of batches, or a generator that never ends"
            )
    return several


def first_leaf(error: BaseException) -> BaseException:
    """The first exception in an exception group, however deep."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Trainers(Generic[Batch, State, AnyTrunk]):
    """The trainers of one process, with the trunk that they share. Made by `Swarm.trainer`.

    Args:
      batches: one iterator of batches for each trainer.
      seed: seed of all chance in training.
    """

    def __init__(
        self, model: Model[Batch, State], trunk: AnyTrunk, batches: Sequence[Iterator[Batch]], *, seed: int
    ) -> None:
        self.model = model
        self.trunk = trunk
        self.trainers = tuple(Trainer(index, model, trunk, each, seed=seed) for index, each in enumerate(batches))
        self._is_compiled = False

    @property
    def params(self) -> PyTree:
        """The model's parameters as they are now."""
        return self.trunk.params

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.trunk.step

    def state(self) -> PyTree:
        """Parameters and optimiser state, valid until the next update."""
        return self.trunk.state

    async def snapshot(self) -> tuple[int, PyTree]:
        """The step, and a copy of the state after it on the host."""
        return await self.trunk.snapshot()

    def facts(self) -> dict[str, Any]:
        """Facts of a checkpoint beside the state."""
        return self.trunk.facts()

    def restore(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.trunk.restore(step, state, facts)

    async def run(self, num_steps: int, on_step: OnStep = unheard, on_lost: OnLost = unheard) -> None:
        """Make `num_steps` further updates, all trainers together, or end with the data.

        Args:
          on_step, on_lost: as of `Trainer.run`.

        Raises:
          FloatingPointError, RouterError, TooFewExperts: as of `Trainer.run`. They come alone, not in a group.
        """
        last_step = self.step + num_steps
        if num_steps > 0 and not self._is_compiled:
            await self.side_by_side(lambda trainer: trainer.run(self.step + 1, on_step, on_lost))
        if self.step < last_step:
            await self.side_by_side(lambda trainer: trainer.run(last_step, on_step, on_lost))

    async def side_by_side(self, work: Callable[[Trainer[Batch, State]], Awaitable[None]]) -> None:
        """Let each trainer do it, at the same time; for the first time one alone.

        The model's segments compile where `forward` calls them, on the event loop: answers to others would look late.
        """
        trainers = self.trainers if self._is_compiled else self.trainers[:1]
        self._is_compiled = True
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                for trainer in trainers:
                    nursery.start_soon(work, trainer)
        except BaseExceptionGroup as group:
            failure = first_leaf(group)
        if failure is not None:
            raise failure

    async def evaluate(self, batches: Iterable[Batch], on_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """The model's evaluation with the parameters as they are now; see `Model.evaluate`."""
        return await self.model.evaluate(self.params, batches, on_batch)


AnyTrainers = Trainers[Any, Any, Any]
"""The trainers of some model over some trunk."""
SharingTrainers = Trainers[Batch, State, SharedTrunk]
"""Trainers that share their trunk with nobody else, or average it."""


def first_params(
    model: Model[Any, Any], params: PyTree | None, mesh: MeshLike | None, *, seed: int, num_trainers: int
) -> PyTree:
    """Parameters to begin with, on the mesh: those that are given, or else the model's own.

    Raises:
      ValueError: they lie on several processes, and there are several trainers, or not all processes have a part; or as
        of `laid_out`.
    """
    laid = laid_out(model.init(jax.random.key(seed)) if params is None else params, mesh)
    if tree_spans_processes(laid):
        check_on_all_processes(laid)
        if num_trainers > 1:
            raise ValueError(
                f"a trunk on the devices of several processes has one trainer, the same in each of them, got batches "
                f"for {num_trainers}: make its batches larger instead"
            )
    return laid


def make_trainers(
    model: Model[Batch, State],
    optimizer: optax.GradientTransformation,
    batches: Iterator[Batch] | Sequence[Iterator[Batch]],
    *,
    params: PyTree | None,
    mesh: MeshLike | None,
    seed: int,
    device: Device,
) -> SharingTrainers[Batch, State]:
    """See `Swarm.trainer`; the device runs the updates."""
    several = iterators_of(batches)
    params = first_params(model, params, mesh, seed=seed, num_trainers=len(several))
    return Trainers(model, SharedTrunk(params, optimizer, device), several, seed=seed)
