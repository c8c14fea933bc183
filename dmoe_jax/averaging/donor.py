"""A training loop's state as arrays that travel, and back."""

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import trio

from dmoe_jax.arrays import PyTree, sent, stored
from dmoe_jax.averaging.replica import ComingCopy, CopyTogether, copied_pieces
from dmoe_jax.machine.device import Device, to_host
from dmoe_jax.mesh.shards import held_pieces, with_pieces
from dmoe_jax.optim.host_state import host_state, without_taken
from dmoe_net.averaging.state.buffer import Table
from dmoe_net.averaging.state.sharing import MAX_VERSION, SharedState, StateSource
from dmoe_net.errors import CallRefused, PeerBusy, RemoteProtocolError
from dmoe_net.types import Array
from dmoe_net.wire.fields import integer, optional

_PROGRESS = "progress"
_SNAPSHOT_ATTEMPTS = 3
"""A loop in another thread may donate the arrays of a state just when they are copied."""
_PATIENCE_S = 20.0
"""Seconds for which a newcomer waits for the next step of a donor's loop, or two steps if these take longer. Shorter
than `StateSharingConfig.call_timeout_s`."""


def donor_source(state: Callable[[], tuple[int, PyTree]], device: Device) -> StateSource:
    """A donor's state, copied whenever a newcomer asks for it.

    Args:
      state: (how far it is, the state now); called from the event loop.
      device: brings the copies to the host.
    """

    async def snapshot() -> SharedState:
        for _ in range(_SNAPSHOT_ATTEMPTS):
            version, tree = state()
            leaves = [piece for leaf in jax.tree.leaves(tree) for piece in held_pieces(leaf)]
            try:  # in the event loop: a training loop that runs in it cannot donate them meanwhile
                copies = [jnp.array(stored(leaf)) if isinstance(leaf, jax.Array) else np.array(leaf) for leaf in leaves]
            except RuntimeError:
                if not any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
                    raise
            else:
                return SharedState(version=version, tensors=tuple(map(sent, await to_host(device, copies))))
        raise PeerBusy("the state was donated to an update while it was copied")

    return StateSource(lambda: state()[0], snapshot)


def table_of(tree: PyTree) -> Table:
    """Type and shape of each piece of a state, as donors announce them. Python numbers travel as NumPy's."""
    arrays = (sent(piece) for leaf in jax.tree.leaves(tree) for piece in held_pieces(leaf))
    return [[np.dtype(array.dtype).name, list(array.shape)] for array in arrays]


def tree_like(own: PyTree, tensors: Sequence[Array]) -> PyTree:
    """A received state, a tensor for each piece, in the structure and with the kinds of arrays of one's own."""
    leaves, structure = jax.tree.flatten(own)
    pieces = iter(tensors)
    return jax.tree.unflatten(structure, [with_pieces(leaf, pieces) for leaf in leaves])


def is_finite_state(state: SharedState) -> bool:
    """True if all its numbers are finite."""
    return all(np.isfinite(tensor).all() for tensor in state.tensors if jnp.issubdtype(tensor.dtype, jnp.inexact))


class LoopState:
    """Parameters and optimiser state of a loop that hands them to `TreeAverager.step`: between two steps they may be
    donated, and are not at hand.

    Args:
      device: brings copies to the host.
      together: copies the state with the other processes of a replica; None: this process has all of it.
    """

    def __init__(self, device: Device, together: CopyTogether | None = None) -> None:
        self._device = device
        self.together = together
        self._held: PyTree = None
        self._is_held = trio.Event()
        self._num_waiting = 0
        self._left_at: float | None = None
        self._patience_s = _PATIENCE_S
        self._coming: ComingCopy | None = None
        self.wanted = trio.Event()
        """Set while a newcomer waits for a copy that all processes make."""
        self.progress, self.most_progress = 0, MAX_VERSION
        """A count of the caller's own that goes with a state that all processes copy, and takes, such as its updates;
        and the most that a state to take may have."""
        self.version = 0
        """Averagings behind it, with lost ones, as of the last step."""
        snapshot = self._snapshot if together is None else self._snapshot_together
        self.source = StateSource(lambda: self.version, snapshot)
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

    async def copy_together(self) -> None:
        """Copy what is at hand, as all processes of the replica do now."""
        assert self.together is not None
        tensors = await self._device.run(copied_pieces, self._held)
        facts = {**self.together.took(tensors), _PROGRESS: self.progress}
        if self._coming is not None:
            self._coming.state = SharedState(version=self.version, tensors=tensors, facts=facts)
            self._coming.is_there.set()
            self._coming, self.wanted = None, trio.Event()

    def progress_of_untrusted(self, facts: Mapping[str, Any]) -> int:
        """The count of a donor's state; -1 if that is not to be taken."""
        try:
            progress = optional(integer(0, self.most_progress)).of_untrusted(facts, _PROGRESS)
        except RemoteProtocolError:
            return -1
        return self.progress if progress is None else progress

    async def _snapshot(self) -> SharedState:
        """Copy it while it is at hand: at once, or at the next step.

        Raises:
          CallRefused: the next step does not come, since the loop has ended or its caller does something else.
        """
        self._num_waiting += 1
        try:
            with trio.move_on_at(self._patient_until):
                await self._is_held.wait()
        finally:
            self._num_waiting -= 1
        if not self._is_held.is_set():
            raise self._stands_still()
        held, version = self._held, self.version  # nothing else runs until they are copied
        return await donor_source(lambda: (version, held), self._device).snapshot()

    async def _snapshot_together(self) -> SharedState:
        """Wait for the copy that all processes make at the next step. Raises as `_snapshot`."""
        coming = self._coming = self._coming or ComingCopy()
        self.wanted.set()
        with trio.move_on_at(self._patient_until):
            await coming.is_there.wait()
        if coming.state is None:
            raise self._stands_still()
        return coming.state

    @property
    def _patient_until(self) -> float:
        return math.inf if self._left_at is None else self._left_at + self._patience_s

    def _stands_still(self) -> CallRefused:
        return CallRefused(f"the training loop of this peer has made no step for {self._patience_s:g} s")
