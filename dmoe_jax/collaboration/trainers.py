"""Trainers of one process that gather for the swarm's batch: a `Model` and its batches, as asynchronous ones have."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import trio

from dmoe_jax.collaboration.collaboration import Collaboration
from dmoe_jax.model import Evaluation, Model
from dmoe_jax.trainer import MAX_NOT_FINITE, EndOfData, StepRecord, Trainer, iterators_of
from dmoe_jax.types import PyTree
from net.errors import NetError


class _Gathering:
    """Where a `Trainer` brings its gradients: they are gathered, and the step is the swarm's."""

    def __init__(self, peer: Collaboration) -> None:
        self._peer = peer

    @property
    def step(self) -> int:
        return self._peer.step

    @property
    def params(self) -> PyTree:
        return self._peer.params

    async def apply(
        self,
        grads: PyTree,
        *,
        samples: int,
        read_at: int,
        read_params: PyTree,
        check: Callable[[], None],
    ) -> int:
        """Take in a micro-batch's gradient; returns the number of the step that it will be in."""
        del read_params
        await self._peer.device.run(check)
        await self._peer.gather(grads, samples=samples)
        return read_at + 1


class CollaborativeTrainers:
    """Trainers that compute side by side and gather for one step of the whole swarm. Made by `Swarm.collaborate`.

    Args:
      model: what they train. peer: this process's part in the collaboration.
      batches: one iterator for each trainer.
      seed: of all chance in training.
    """

    def __init__(self, model: Model, peer: Collaboration, batches: Sequence[Iterator[Any]], *, seed: int) -> None:
        self.model = model
        self.peer = peer
        """This process's part in the collaboration."""
        trunk = _Gathering(peer)
        self.trainers = [
            Trainer(index, model, trunk, each, seed=seed) for index, each in enumerate(iterators_of(batches))
        ]
        self._not_finite = 0
        self._is_compiled = False

    @property
    def params(self) -> PyTree:
        """The swarm's parameters, as of this process's last step."""
        return self.peer.params

    @property
    def step(self) -> int:
        """Steps of the whole swarm."""
        return self.peer.step

    def state(self) -> PyTree:
        """Parameters and optimiser state of the swarm."""
        return self.peer.state

    async def snapshot(self) -> tuple[int, PyTree]:
        """The step, and a copy of the state after it on the host."""
        return await self.peer.snapshot()

    def facts(self) -> dict[str, Any]:
        """What a checkpoint needs beside the state."""
        return {"collaboration": self.peer.saved_facts()}

    def restore(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. Where others are further, their state is taken soon after."""
        self.peer.restore(step, state, facts["collaboration"])

    async def run(
        self,
        num_steps: int,
        on_step: Callable[[StepRecord], None] = lambda record: None,
        on_lost: Callable[[int, Exception], None] = lambda trainer, error: None,
    ) -> None:
        """Train until the swarm has made `num_steps` further steps, or the data ends.

        Args:
          on_step: called after each step in which this process took part, with the mean loss of its own samples; where
            the swarm's state was taken, steps in between are left out.
          on_lost: called with the trainer and the error of a micro-batch that was dropped.

        Raises:
          FloatingPointError: so many micro-batches in a row were not finite that the model is beyond help.
          RouterError, TooFewExperts: as of `Trainer.step`.
        """
        last_step, losses, items = self.step + num_steps, 0.0, 0
        while self.step < last_step:
            before, began = self.step, trio.current_time()
            records = await self._side_by_side(on_lost)
            if not records:
                return
            samples = sum(record.items for record in records)
            losses += sum(record.loss * record.items for record in records)
            items += samples
            if samples:
                await self.peer.gathered(samples, trio.current_time() - began)
            else:
                await trio.sleep(0.1)
            if self.step > before:
                if items:
                    on_step(StepRecord(step=self.step, trainer=0, loss=losses / items, items=items, staleness=0))
                losses, items = 0.0, 0

    async def evaluate(self, batches: Iterable[Any], on_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """The model's evaluation with the parameters as they are now; see `Model.evaluate`."""
        return await self.model.evaluate(self.params, batches, on_batch)

    async def _side_by_side(self, on_lost: Callable[[int, Exception], None]) -> list[StepRecord]:
        """A micro-batch of each trainer; those that were dropped have no items. Nothing: the data has ended."""
        records: list[StepRecord] = []

        async def one(index: int, trainer: Trainer) -> None:
            try:
                records.append(await trainer.step())
                self._not_finite = 0
            except EndOfData:
                pass
            except (NetError, FloatingPointError) as error:
                self._not_finite += isinstance(error, FloatingPointError)
                if self._not_finite > MAX_NOT_FINITE * len(self.trainers):
                    raise
                on_lost(index, error)
                records.append(StepRecord(step=self.step, trainer=index, loss=0.0, items=0, staleness=0))

        if not self._is_compiled:
            # Alone: segments compile where `forward` calls them; others would look late.
            self._is_compiled = True
            await one(0, self.trainers[0])
            return records
        async with trio.open_nursery() as nursery:
            for index, trainer in enumerate(self.trainers):
                nursery.start_soon(one, index, trainer)
        return records
