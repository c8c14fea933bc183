"""The state of a training loop that hands it to `TreeAverager.step`: a donor's for newcomers, and a newcomer's own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from dmoe_jax.averaging.donor import donor_source
from dmoe_jax.device import Device
from dmoe_jax.optim.hosting import rounds_of, without_taken
from dmoe_jax.types import PyTree
from net.averaging.state.sharing import SharedState, StateSource


class LoopState:
    """Parameters and optimiser state, as far as they are at hand: between two steps they may be donated.

    Args:
      device: brings copies to the host.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._held: PyTree = None
        self._is_held = trio.Event()
        self._num_waiting = 0
        self.version = 0
        """Averagings behind it, with lost ones, as of the last step."""
        self.may_be_behind = True
        """True if others are to be asked for their state: at the first step, and when rounds came to nothing."""
        self.source = StateSource(lambda: self.version, self._snapshot)
        """Gives the state to newcomers."""

    @asynccontextmanager
    async def at_hand(self, params: PyTree, opt_state: PyTree) -> AsyncIterator[PyTree]:
        """Offer this state to newcomers as long as the block lasts, which gets what is offered."""
        self.version = await self._device.run(rounds_of, opt_state)
        self._held = {"params": params, "opt_state": without_taken(opt_state)}
        self._is_held.set()
        try:
            yield self._held
        finally:
            with trio.CancelScope(shield=True):
                while self._num_waiting:
                    await trio.lowlevel.checkpoint()
            self._held, self._is_held = None, trio.Event()

    async def _snapshot(self) -> SharedState:
        """A copy, made while the state is at hand: at once, or at the next step."""
        self._num_waiting += 1
        try:
            await self._is_held.wait()
        finally:
            self._num_waiting -= 1
        held, version = self._held, self.version  # nothing else runs until they are copied
        return await donor_source(lambda: (version, held), self._device).snapshot()
