"""A peer's training state, who may touch it when, and the form in which it travels to a newcomer."""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import trio

from dmoe_jax.arrays import PyTree, bytes_of, host_copy, kept_like, stored
from dmoe_jax.averaging.donor import tree_like
from dmoe_jax.averaging.replica import copied_pieces
from dmoe_jax.machine.device import Device
from dmoe_jax.machine.remembered import remembered
from dmoe_jax.mesh.layout import mesh_of, sharding_of
from dmoe_jax.mesh.shards import held_pieces
from dmoe_jax.optim.collaborative import Collaborative, CollaborativeState, Contribution, emptied
from dmoe_jax.optim.tree_vectors import TreeLayout
from dmoe_net.averaging.collaboration.progress import CHAIN_BYTES
from dmoe_net.averaging.collaboration.rounds import Averaged
from dmoe_net.types import Array

T = TypeVar("T")


class PeerState:
    """The state, changed by one task at a time and never while it is donated.

    Args:
      together: the optimiser. params: to begin with. device: runs what changes it.
    """

    def __init__(self, together: Collaborative, params: PyTree, device: Device) -> None:
        self.device = device
        self.now: CollaborativeState = together.init(params)
        """As it is after the last change. All but its parameters are donated to the next one."""
        self.layout = TreeLayout(params)
        self._brought: deque[tuple[Array, PyTree]] = deque(maxlen=2)  # what vectors were before they were rounded
        self._is_spread = mesh_of(self.now.params) is not None
        self._turn = trio.Lock()
        self._programs = _programs_of(together)

    def digest(self) -> bytes:
        """The chain, `CHAIN_BYTES` long, of all peers that begin with these parameters; of the pieces of them that this
        process holds."""
        found = hashlib.blake2b(digest_size=CHAIN_BYTES)
        for leaf in jax.tree.leaves(self.now.params):
            for piece in held_pieces(leaf):
                found.update(bytes_of(piece))
        return found.digest()

    async def _change(self, work: Callable[[CollaborativeState], CollaborativeState]) -> None:
        """Run `work` on the device; it may donate the state that it is given."""
        # Shielded: a cancelled change would leave a donated, dead state behind.
        async with self._turn:
            with trio.CancelScope(shield=True):
                self.now = await self._run(work, self.now)

    async def _run(self, work: Callable[[CollaborativeState], Any], state: CollaborativeState) -> Any:
        if not self._is_spread:
            return await self.device.run(work, state)
        # Begun by the thread that begins the model's programs, as `SharedTrunk` does it: devices that are given two
        # programs in different orders wait for each other for ever.
        begun = work(state)
        return await self.device.run(lambda: begun)

    async def gather(self, grads: PyTree, samples: int) -> None:
        await self._change(lambda state: self._programs.gather(state, grads, np.float32(samples)))

    async def contribution(self) -> Averaged:
        """Return what this peer brings: its samples are the weight, its overflows the notes."""

        def work(state: CollaborativeState) -> Contribution:
            own = self._programs.contribution(state)
            return own._replace(mean=self.layout.laid_out(own.mean))

        def on_host(own: Any) -> Averaged:
            vector = self.layout.to_vector(own.mean)
            if self.layout.rounding:
                self._brought.append((vector, own.mean))
            return Averaged(mean=vector, weight=float(own.samples), notes=float(own.overflows))

        async with self._turn:
            return await self.device.run(on_host, await self._run(work, self.now))

    async def step(self, whole: Averaged) -> None:
        """Make the global step with what all peers brought."""
        await self._change(lambda state: self._programs.step(state, self._on_device(whole)))

    def _on_device(self, whole: Averaged) -> Contribution:
        exact = [tree for vector, tree in self._brought if vector is whole.mean]
        tree = exact[0] if exact else self.layout.to_tree(whole.mean, self.now.params)
        return Contribution(tree, np.float32(whole.weight), np.float32(whole.notes))

    def is_exact(self, mean: Array) -> bool:
        """True if a step with this mean uses more digits than travel: this peer's alone, of float64 parameters."""
        return any(vector is mean for vector, _ in self._brought)

    async def empty(self) -> None:
        await self._change(emptied)

    @property
    def shared(self) -> PyTree:
        """The state for newcomers: everything but this peer's own contribution; random keys as their data."""
        return jax.tree.map(stored, _shared(self.now))

    async def snapshot(self, whole: Averaged | None = None) -> PyTree:
        """Copy it to the host between two changes; the copy has made the step with `whole`, if there is one."""
        return await self._copied(host_copy, whole)

    async def pieces(self, whole: Averaged | None = None) -> tuple[Array, ...]:
        """Do as `snapshot`, of all that this process holds, in the form that travels."""
        return await self._copied(copied_pieces, whole)

    async def _copied(self, copy: Callable[[PyTree], T], whole: Averaged | None) -> T:
        def work(state: CollaborativeState) -> T:
            if whole is not None:
                state = self._programs.step_of_copy(state, self._on_device(whole))
            return copy(_shared(state))

        async with self._turn:
            return await self.device.run(work, self.now)

    async def take(self, tensors: Sequence[Array]) -> None:
        """Take another peer's state, as the pieces of `shared` in their order."""
        await self._change(lambda state: emptied(state._replace(**tree_like(_shared(state), tensors))))

    def restore(self, shared: PyTree) -> None:
        """Go on from a `snapshot`. Only while nothing else is done."""
        self.now = emptied(self.now._replace(**jax.tree.map(kept_like, _shared(self.now), shared)))


def _shared(state: CollaborativeState) -> dict[str, PyTree]:
    names = ("params", "inner", "steps", "anchor", "outer", "scale", "good_steps")
    return {name: value for name in names if (value := getattr(state, name)) is not None}


class _Programs:
    """The compiled functions of an optimiser; once for all peers of a process."""

    def __init__(self, together: Collaborative) -> None:
        self.gather = _keeping_params(together.gather)
        self.contribution = jax.jit(together.contribution)
        self.step = _keeping_params(together.step)
        self.step_of_copy = jax.jit(together.step)


_programs_of = remembered()(_Programs)


def _keeping_params(work: Callable[..., CollaborativeState]) -> Callable[..., CollaborativeState]:
    """Compile `work(state, *args)`. All of the state is donated but the parameters, which others may still read."""

    def split(params: PyTree, rest: CollaborativeState, *args: Any) -> tuple[CollaborativeState, PyTree]:
        state = work(rest._replace(params=params), *args)
        # The parameters last: JAX pairs what is donated with results of the same shape in the order of both, and each
        # array of the rest shall be written where it was.
        return state._replace(params=None), state.params

    @remembered(4)
    def compiled(shardings: tuple[Any, ...], structure: Any) -> Callable[..., tuple[CollaborativeState, PyTree]]:
        if not any(shardings):
            return jax.jit(split, donate_argnums=1)
        return jax.jit(split, donate_argnums=1, out_shardings=jax.tree.unflatten(structure, shardings))

    def kept(state: CollaborativeState, *args: Any) -> CollaborativeState:
        # Each array stays where it is: XLA would choose anew.
        before = state._replace(params=None), state.params
        leaves, structure = jax.tree.flatten(before)
        rest, params = compiled(tuple(map(sharding_of, leaves)), structure)(state.params, before[0], *args)
        return rest._replace(params=params)

    return kept
