"""The state of a training loop that hands it to `TreeAverager.step`: a donor's for newcomers, and a newcomer's own."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from dmoe_jax.averaging.donor import donor_source
from dmoe_jax.device import Device
from dmoe_jax.optim.host_state import host_state, without_taken
from dmoe_jax.types import PyTree
from net.averaging.state.sharing import SharedState, StateSource
from net.errors import CallRefused

_PATIENCE_S = 20.0
"""Seconds for which a newcomer waits for the next step of a donor's loop, or two steps if these take longer. Shorter
than `StateSharingConfig.call_timeout_s`."""


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
        self._left_at: float | None = None
        self._patience_s = _PATIENCE_S
        self.version = 0
        """Averagings behind it, with lost ones, as of the last step."""
        self.may_be_behind = True
        """True if others are to be asked for their state: at the first step, and when rounds came to nothing."""
        self.ask_again_at = math.inf
        """trio's time when they are to be asked again: they are ahead, and their loops stood still."""
        self.source = StateSource(lambda: self.version, self._snapshot)
        """Gives the state to newcomers."""

    @asynccontextmanager
    async def at_hand(self, params: PyTree, opt_state: PyTree) -> AsyncIterator[PyTree]:
        """Offer this state to newcomers as long as the block lasts, which gets what is offered."""
        self.version = await self._device.run(lambda: int(host_state(opt_state).rounds))
        if self._left_at is not None:
            self._patience_s = max(_PATIENCE_S, 2 * (trio.current_time() - self._left_at))
        self._held = {"params": params, "opt_state": without_taken(opt_state)}
        self._is_held.set()
        try:
            yield self._held
        finally:
            with trio.CancelScope(shield=True):
                while self._num_waiting:
                    await trio.lowlevel.checkpoint()
            self._held, self._is_held, self._left_at = None, trio.Event(), trio.current_time()

    async def _snapshot(self) -> SharedState:
        """A copy, made while the state is at hand: at once, or at the next step.

        Raises:
          CallRefused: the next step does not come, since the loop has ended or its caller does something else.
        """
        self._num_waiting += 1
        try:
            with trio.move_on_at(math.inf if self._left_at is None else self._left_at + self._patience_s):
                await self._is_held.wait()
        finally:
            self._num_waiting -= 1
        if not self._is_held.is_set():
            raise CallRefused(f"the training loop of this peer has made no step for {self._patience_s:g} s")
        held, version = self._held, self.version  # nothing else runs until they are copied
        return await donor_source(lambda: (version, held), self._device).snapshot()
