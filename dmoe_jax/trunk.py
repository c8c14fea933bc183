"""Parameters and optimiser state that the trainers of one process share.

A trainer reads the parameters, computes for a while, and applies its gradient to what they have become: updates happen
one after another, and none waits for a trainer. With a `moshpit_average` as its optimiser, a trunk is averaged with
those of other processes meanwhile (`open_trunk_averaging`): rounds begin and are applied by the trunk's own updates, as
in a loop of one's own. A process that was left behind takes the whole state of the one that is furthest.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import jax
import numpy as np
import optax
import trio
from jax.sharding import Sharding

from dmoe_jax.arrays import PyTree, as_params, kept_like, sent, stored
from dmoe_jax.averaging import Round, TreeAverager, TreeAveragerConfig, open_tree_averager
from dmoe_jax.machine.device import Device
from dmoe_jax.machine.remembered import remembered
from dmoe_jax.mesh.layout import init_like, mesh_of, put, sharding_of, shardings_like, whole_on_host
from dmoe_jax.mesh.shards import tree_spans_processes
from dmoe_jax.optim.host_state import averaging_due, gone_over
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_net.averaging.state.sharing import MAX_VERSION, SharedState, StateSource
from dmoe_net.nursery import background_nursery


class SharedTrunk:
    """Trunk parameters, initially copies of `params`, and optimiser state that the trainers of one process share.

    Parameters that lie on several devices stay there as they lie, for good, and the optimiser's state with them.

    Args:
      optimizer: an Optax optimiser; its schedule counts trunk updates, not steps of one trainer, and inside a
        `moshpit_average` of gradients the averagings.
      device: runs the updates, and what trainers wait for.
    """

    def __init__(self, params: PyTree, optimizer: optax.GradientTransformation, device: Device) -> None:
        self.params = as_params(params)
        self.optimizer = optimizer
        # Copies, since it is donated: some optimisers keep the very parameters in it, or one array twice.
        self.opt_state = init_like(optimizer.init, self.params)
        self.step = 0
        """Gradients applied, whatever the optimiser makes of them: while gradients are averaged, updates are zero."""
        self.averager: TreeAverager | None = None
        """Averages the optimiser's offers with other processes; None: nothing is averaged."""
        self.device = device
        self._claimed = 0
        self._turn = trio.Lock()
        self._is_spread = mesh_of(self.params) is not None
        self._update = spread_update(optimizer, self.params) if self._is_spread else trunk_update(optimizer)

    @property
    def state(self) -> dict[str, PyTree]:
        """Parameters and optimiser state, which is donated to the next update; random keys as their data."""
        return jax.tree.map(stored, {"params": self.params, "opt_state": self.opt_state})

    async def snapshot(self) -> tuple[int, dict[str, PyTree]]:
        """The number of updates and a copy of the state after them, on the host. Processes that share it call this at
        the same time; each then has the whole."""
        async with self._turn:
            return self.step, await self.device.run(whole_on_host, self.state)

    def facts(self) -> dict[str, Any]:
        return {}

    def restore(self, step: int, state: dict[str, PyTree], facts: Mapping[str, Any] | None = None) -> None:
        """Continue from a saved state. Only while no trainer runs.

        While the trunk is averaged an older state is passed over: that of a process that was ahead has been taken.
        """
        if self.averager is not None and step < self.step:
            return
        self.step = step
        own = self.params, self.opt_state
        self.params, self.opt_state = jax.tree.map(kept_like, own, (state["params"], state["opt_state"]))

    def claim(self, num_steps: int) -> bool:
        """Set one of the first `num_steps` updates aside for a trainer; False if all are applied or being made."""
        if self.step + self._claimed >= num_steps:
            return False
        self._claimed += 1
        return True

    def release(self) -> None:
        """Give a claimed update back, made or not."""
        self._claimed -= 1

    async def apply(
        self,
        grads: PyTree,
        *,
        samples: int | None = None,
        read_at: int | None = None,
        read_params: PyTree | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> int:
        """Step with these gradients and return the number of the update. If cancelled, it was made or not.

        Args:
          samples: number that the gradients are a mean of, for averages that are weighted by it.
          read_at: `step` when the parameters were read that the gradients are for. The updates since then, until it is
            this one's turn, are the staleness that the optimiser is told. None: nothing is stale.
          read_params: these parameters, for optimisers that use them (`compensate_delay`).
          check: called on the device before the update; if it raises, the trunk stays as it was.
        """
        counted = None if samples is None else np.float32(samples)
        async with self._turn:
            # Shielded: a cancelled update would leave donated, dead optimiser state behind.
            with trio.CancelScope(shield=True):
                staleness = np.float32(0 if read_at is None else max(0, self.step - read_at))
                told = (grads, counted, staleness, read_params)
                self.opt_state, self.params = await self._updated(check, self.params, self.opt_state, *told)
            self.step = number = self.step + 1
            averager = self.averager
            if averager is not None and averager.loop is not None:  # several processes copy and take states here
                averager.loop.progress = self.step
                opt_state = await averager.step(self.opt_state, self.params)
                self.params, self.opt_state = gone_over(self.params, opt_state)
                self.step = averager.loop.progress
            elif averager is not None and (averager.is_under_way or averaging_due(self.opt_state)):
                self.opt_state = await averager.step(self.opt_state, self.params)
            return number

    async def _updated(self, check: Callable[[], None], *args: Any) -> tuple[PyTree, PyTree]:
        """Check, and update with arguments of `trunk_update`."""

        def update(*args: Any) -> tuple[PyTree, PyTree]:
            check()
            return self._update(*args)

        if not self._is_spread:
            return await self.device.run(update, *args)
        await self.device.run(check)
        # Begun by the thread that begins the model's segments. Each device does what it is given in order: two threads
        # might give it in one order here and in another there, and programs would wait for each other for ever.
        updated = self._update(*args)
        return await self.device.run(lambda: updated)

    async def catch_up(self, *, min_lead: int, max_step: int = MAX_VERSION) -> bool:
        """Take up the state of a process that is at least `min_lead` updates ahead, and return True if one was taken.

        A state of other shapes, of a step beyond `max_step` or with values that are not finite is passed over, and so
        is one that is no longer ahead when it arrives. Only while the trunk is averaged. One on the devices of several
        processes takes nothing here: its updates do so, whenever others are averagings ahead.
        """
        averager = self.averager
        if averager is None or averager.loop is not None:  # averaging has just ended; or `apply` does so by itself
            return False
        taken = await averager.fetch_state(self.step, self.state, min_lead=min_lead, max_version=max_step)
        return taken is not None and await self.replace(*taken, min_lead=min_lead)

    async def replace(self, step: int, state: dict[str, PyTree], *, min_lead: int = 1) -> bool:
        """Take up another process's state between two updates, if it is still `min_lead` ahead; return True if so.

        Steps under way are applied to it, as stale ones. A round of averaging that is under way is dropped.
        """
        async with self._turn:
            if step < self.step + min_lead:
                return False
            self.restore(step, state)
            if self.averager is not None:
                self.averager.state_was_taken()
            return True


@asynccontextmanager
async def open_trunk_averaging(
    peer: SwarmPeer,
    trunk: SharedTrunk,
    *,
    name: str,
    config: TreeAveragerConfig = TreeAveragerConfig(),  # noqa: B008 (frozen)
    max_step: int = MAX_VERSION,
    device: Device | None = None,
    on_round: Callable[[Round], None] = lambda done: None,
) -> AsyncIterator[TreeAverager]:
    """Average a trunk whose optimiser has a `moshpit_average` in it, as long as the block lasts.

    This process is a donor of its state meanwhile, and catches up whenever rounds come to nothing or others are ahead.
    Processes that hold a trunk together open this at the same time, and do so as one.

    Args:
      max_step: end of the run; states that claim to be further are not taken.
      peer, name, config, device, on_round: as of `open_tree_averager`, whose errors are raised.
    """

    async def snapshot() -> SharedState:
        step, state = await trunk.snapshot()
        return SharedState(version=step, tensors=tuple(map(sent, jax.tree.leaves(state))))

    async def keep_up() -> None:
        while averager.loop is None:
            await averager.wait_until_left_behind()
            await trunk.catch_up(min_lead=1, max_step=max_step)

    async with (
        open_tree_averager(
            peer,
            trunk.params,
            optimizer=trunk.optimizer,
            name=name,
            state=None if tree_spans_processes(trunk.params) else StateSource(lambda: trunk.step, snapshot),
            config=config,
            device=device,
            on_round=on_round,
        ) as averager,
        background_nursery() as nursery,
    ):
        if averager.loop is not None:
            averager.loop.most_progress = max_step
        trunk.averager = averager
        nursery.start_soon(keep_up)
        try:
            yield averager
        finally:
            trunk.averager = None


@remembered()
def trunk_update(optimizer: optax.GradientTransformation) -> Callable[..., tuple[PyTree, PyTree]]:
    """The compiled (params, opt_state, grads, samples, staleness, read_params=None) -> (opt_state, params).

    The optimiser is told `samples` and `read_params` unless they are None.
    """
    return jax.jit(_update_of(optimizer), donate_argnums=1)


def spread_update(optimizer: optax.GradientTransformation, params: PyTree) -> Callable[..., tuple[PyTree, PyTree]]:
    """`trunk_update` for parameters on several devices: all stays as these lie, where XLA might move it."""
    update, own = _update_of(optimizer), jax.tree.map(lambda leaf: leaf.sharding, params)
    programs: dict[Any, tuple[PyTree, Callable[..., tuple[PyTree, PyTree]]]] = {}  # by the structure of the state

    def placed(leaf: Any, sharding: Sharding) -> Any:
        # An average that came over the network may be on one device.
        return put(leaf, sharding) if sharding_of(leaf) is None else leaf

    def updated(params: PyTree, opt_state: PyTree, *args: Any) -> tuple[PyTree, PyTree]:
        structure = jax.tree.structure(opt_state)
        if structure not in programs:
            found = shardings_like(opt_state, params)
            programs[structure] = found, jax.jit(update, donate_argnums=1, out_shardings=(found, own))
        shardings, program = programs[structure]
        return program(params, jax.tree.map(placed, opt_state, shardings), *args)

    return updated


def _update_of(optimizer: optax.GradientTransformation) -> Callable[..., tuple[PyTree, PyTree]]:
    """The function that `trunk_update` compiles."""
    optimizer = optax.with_extra_args_support(optimizer)

    # Parameters are not donated: trainers in the middle of a step still hold the version that they started with.
    def update(
        params: PyTree, opt_state: PyTree, grads: PyTree, samples: Any, staleness: Any, read_params: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        known = {"samples": samples, "read_params": read_params}
        told = {name: value for name, value in known.items() if value is not None}
        updates, opt_state = optimizer.update(grads, opt_state, params, staleness=staleness, **told)
        # The state first: JAX pairs what is donated with results of the same shape in the order of both. With the
        # parameters first they would take the place of Adam's first moment, and both moments would be copied.
        return opt_state, optax.apply_updates(params, updates)

    return update
