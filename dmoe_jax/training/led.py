"""A run of `dmoe train` by the processes of one replica, whose trunk lies on the devices of all of them.

Process 0 alone has the run loop, the folder and the progress. What that does with its engine it tells the others first,
and they do the same with theirs: so all run the same programs in the same order. Steps agree by themselves
(`dmoe_jax.mesh.agreement`).
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import jax
import numpy as np
import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.averaging.replica import replica_of
from dmoe_jax.mesh.agreement import from_first
from dmoe_jax.mesh.layout import mesh_of, to_host
from dmoe_jax.model import Evaluation
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_jax.runs.endings import mistakes_in_one_line
from dmoe_jax.trainer import OnLost, OnStep, unheard
from dmoe_jax.training.engine import Engine, OnBatch
from dmoe_net.averaging.replica import Replica
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.nursery import background_nursery
from dmoe_net.wire.fields import MAPPING, integer, optional, text

_ORDERS = "orders of a run"
_COUNT, _SPLIT = integer(0, 2**62), text(1, 64)

OnReplicaLost = Callable[[str], None]
"""Hears why the processes cannot go on, beside what is raised: a program may wait for one that is gone, for ever."""


@asynccontextmanager
async def opened_lead(
    engine: Engine, peer: SwarmPeer, *, settings: str, on_lost: OnReplicaLost
) -> AsyncIterator[Engine]:
    """The engine of the run loop in process 0: others follow it while the block lasts. The engine itself, if its state
    is this process's own.

    Raises:
      UsageError: the others were started with other settings, or cannot be called. ReplicaLost: they do not come.
    """
    async with _opened(engine, peer, settings, on_lost) as replica:
        if replica is None:
            yield engine
            return
        lead = LeadingEngine(engine, replica)
        yield lead
        await lead.order("end")


async def follow(engine: Engine, peer: SwarmPeer, *, settings: str, on_lost: OnReplicaLost) -> None:
    """Do with the engine what process 0 does with its own, until its run has ended. Raises as `opened_lead`, and what
    the engine raises, there and here."""
    async with _opened(engine, peer, settings, on_lost) as replica:
        assert replica is not None, "processes that share nothing follow nobody"
        while True:
            order = MAPPING.read_untrusted(await replica.decided(_ORDERS), "an order")
            kind = text(1, 32).of_untrusted(order, "do")
            if kind == "end":
                return
            if kind == "load":
                step, facts = _COUNT.of_untrusted(order, "step"), MAPPING.of_untrusted(order, "facts")
                state = _of_first(engine, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), engine.state()))
                engine.load(step, state, {**engine.facts(), **facts})
            elif kind == "advance":
                await engine.advance(_COUNT.of_untrusted(order, "steps"), unheard, unheard)
            elif kind == "evaluate":
                most = optional(_COUNT).of_untrusted(order, "max_items")
                await engine.evaluate(_SPLIT.of_untrusted(order, "split"), max_items=most, on_batch=unheard)
            elif kind == "snapshot":  # one array after the other, and none is kept here
                for leaf in jax.tree.leaves(engine.state()):
                    await trio.to_thread.run_sync(to_host, leaf)
            else:
                raise RemoteProtocolError(f"there is no order to {kind!r}")


class LeadingEngine:
    """An `Engine` with which those of the other processes do the same."""

    def __init__(self, engine: Engine, replica: Replica) -> None:
        self._engine = engine
        self._replica = replica
        self._loaded: tuple[int, PyTree, Mapping[str, Any]] | None = None
        self.name, self.layers = engine.name, engine.layers
        self.state, self.facts, self.totals = engine.state, engine.facts, engine.totals

    @property
    def step(self) -> int:
        return self._engine.step

    def load(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        self._engine.load(step, state, facts)
        self._loaded = step, state, facts

    async def advance(self, num_steps: int, on_step: OnStep, on_lost: OnLost) -> None:
        await self.order("advance", steps=num_steps)
        await self._engine.advance(num_steps, on_step, on_lost)

    async def evaluate(self, split: str, *, max_items: int | None, on_batch: OnBatch) -> Evaluation:
        await self.order("evaluate", split=split, max_items=max_items)
        return await self._engine.evaluate(split, max_items=max_items, on_batch=on_batch)

    async def snapshot(self) -> tuple[int, PyTree]:
        await self.order("snapshot")
        return await self._engine.snapshot()

    async def order(self, kind: str, **facts: Any) -> None:
        """Tell the others what comes next; first, what was loaded."""
        if self._loaded is not None:
            (step, state, told), self._loaded = self._loaded, None
            # Statistics are each process's own.
            own = {name: fact for name, fact in told.items() if name != "statistics"}
            await self._replica.decided(_ORDERS, {"do": "load", "step": step, "facts": own})
            _of_first(self._engine, state)
        await self._replica.decided(_ORDERS, {"do": kind, **facts})


def _of_first(engine: Engine, state: PyTree) -> PyTree:
    """The state of process 0 in all processes, one array after the other."""
    mesh = mesh_of(engine.state())
    assert mesh is not None
    return jax.tree.map(lambda leaf: from_first(mesh, np.asarray(leaf)), state)


@asynccontextmanager
async def _opened(
    engine: Engine, peer: SwarmPeer, settings: str, on_lost: OnReplicaLost
) -> AsyncIterator[Replica | None]:
    async def listen(replica: Replica) -> None:
        on_lost(await replica.wait_until_lost())

    async with AsyncExitStack() as stack:
        with mistakes_in_one_line():
            opening = replica_of(peer, engine.state(), name="run.steps", settings=settings)
            replica = await stack.enter_async_context(opening)
        nursery = await stack.enter_async_context(background_nursery())
        if replica is not None:
            nursery.start_soon(listen, replica)
        yield replica
