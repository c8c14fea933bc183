"""Trainers of one process that gather for the swarm's batch: a `Model` and its batches, as asynchronous ones have."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.collaboration.collaboration import Collaboration
from dmoe_jax.mesh.layout import whole_on_host
from dmoe_jax.mesh.shards import tree_spans_processes
from dmoe_jax.model import Batch, Model, State
from dmoe_jax.trainer import EndOfData, OnLost, OnStep, StepRecord, Trainer, Trainers, unheard


class _Gathering:
    """A `Trunk` whose gradients are gathered, and whose steps are the swarm's."""

    def __init__(self, peer: Collaboration) -> None:
        self._peer = peer

    @property
    def step(self) -> int:
        return self._peer.step

    @property
    def params(self) -> PyTree:
        return self._peer.params

    @property
    def state(self) -> PyTree:
        return self._peer.state

    async def snapshot(self) -> tuple[int, PyTree]:
        """Return the step, and a copy of the state after it on the host. Processes that share the state call this at
        the same time; each then has the whole.

        Raises:
          ValueError: processes share the state, and its updates are delayed.
        """
        peer = self._peer
        if peer.standing.config.delayed or not tree_spans_processes(peer.params):
            return await peer.snapshot()
        return peer.step, await peer.device.run(whole_on_host, peer.state)

    def facts(self) -> dict[str, Any]:
        return {"collaboration": self._peer.saved_facts()}

    def restore(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. The state of others that are further is taken soon after."""
        self._peer.restore(step, state, facts["collaboration"])

    async def apply(
        self, grads: PyTree, *, samples: int, read_at: int, read_params: PyTree, check: Callable[[], None]
    ) -> int:
        """Take in a micro-batch's gradient; return the number of the step that it will be in."""
        del read_params
        await self._peer.device.run(check)
        await self._peer.gather(grads, samples=samples)
        return read_at + 1


class CollaborativeTrainers(Trainers[Batch, State, _Gathering]):
    """Trainers that compute side by side and gather for one step of the whole swarm. Made by `Swarm.collaborate`.

    `params` and `step` are the swarm's, as of this process's last step.
    """

    def __init__(
        self, model: Model[Batch, State], peer: Collaboration, batches: Sequence[Iterator[Batch]], *, seed: int
    ) -> None:
        super().__init__(model, _Gathering(peer), batches, seed=seed)
        self.peer = peer
        """This process's part in the collaboration."""

    async def run(self, num_steps: int, on_step: OnStep = unheard, on_lost: OnLost = unheard) -> None:
        """Train until the swarm has made `num_steps` further steps, or the data ends.

        Args:
          on_step: called after each step in which this process took part, with the mean loss of its own samples; where
            the swarm's state was taken, steps in between are left out.
          on_lost: called with the trainer and the error of a micro-batch that was dropped.

        Raises:
          FloatingPointError, RouterError, TooFewExperts: as of `Trainer.attempt`. They come alone, not in a group.
        """
        last_step, losses, items = self.step + num_steps, 0.0, 0
        while self.step < last_step:
            before, began = self.step, trio.current_time()
            attempts = await self._micro_batches(on_lost)
            if not attempts:
                return
            records = [record for record in attempts if record is not None]
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

    async def _micro_batches(self, on_lost: OnLost) -> list[StepRecord | None]:
        """A micro-batch of each trainer, None for one that was dropped. Nothing: the data has ended."""
        attempts: list[StepRecord | None] = []

        async def one(trainer: Trainer[Batch, State]) -> None:
            with suppress(EndOfData):
                attempts.append(await trainer.attempt(on_lost))

        await self.side_by_side(one)
        return attempts
