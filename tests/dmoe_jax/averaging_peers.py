"""Peers with an optimiser that averages, in the simulated swarm of the tests of averaging."""

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.averaging import TreeAverager, TreeAveragerConfig, open_tree_averager
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.optim import apply_average
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_net.rpc.peer import RpcPeer
from tests.net.averaging_swarm import Place, Swarm, in_swarm, open_place

CONFIG = TreeAveragerConfig(side=2, window_s=2.0, timeout_s=4.0)


@functools.cache
def _compiled(optimizer: optax.GradientTransformationExtraArgs) -> tuple[Any, Any]:
    return jax.jit(optimizer.update), jax.jit(functools.partial(apply_average, optimizer))


class Loop:
    """A training loop with gradients given from outside; it begins with a tree, or {"w": [3]} of a number."""

    def __init__(self, optimizer: optax.GradientTransformationExtraArgs, start: float | PyTree = 0.0) -> None:
        self.optimizer = optimizer
        params = {"w": jnp.full(3, start)} if isinstance(start, float) else start
        self.params: PyTree = jax.tree.map(jnp.asarray, params)
        self.opt_state = optimizer.init(self.params)
        self.steps = 0
        self._update, self._apply = _compiled(optimizer)

    @property
    def values(self) -> np.ndarray:
        """The parameters, [3]."""
        return np.asarray(self.params["w"])

    @property
    def state(self) -> tuple[int, Any]:
        """The state that a newcomer takes."""
        return self.steps, (self.params, self.opt_state)

    @state.setter
    def state(self, taken: tuple[int, Any]) -> None:
        self.steps, (self.params, self.opt_state) = taken

    def learn(self, grads: Any, **extra: Any) -> None:
        """One update with the gradients, or with a number for all of them."""
        if not isinstance(grads, dict):
            grads = {"w": jnp.broadcast_to(jnp.asarray(grads, jnp.float32), 3)}
        updates, self.opt_state = self._update(grads, self.opt_state, self.params, **extra)
        self.params = optax.apply_updates(self.params, updates)
        self.steps += 1

    async def step(self, averager: TreeAverager, grads: Any, *, wait: bool = False, **extra: Any) -> None:
        """One update, and the averager's turn."""
        self.learn(grads, **extra)
        self.opt_state = await averager.step(self.opt_state, self.params, wait=wait)

    def apply(self) -> None:
        """Go on from an average that has arrived, at once."""
        self.params, self.opt_state = self._apply(self.opt_state, self.params)


Live = Callable[[TreeAverager, Loop], Awaitable[None]]


def peer_at(place: Place, wrap: Callable[[RpcPeer], Any] = lambda rpc: rpc) -> SwarmPeer:
    """The peer of a place, with its caller wrapped."""
    return SwarmPeer(rpc=wrap(place.rpc), dht=place.dht, rng=place.rng, is_simulated=True)


async def swarm_lived(swarm: Swarm, *names: str) -> None:
    """Wait until these peers have lived."""
    with trio.fail_after(1000):
        for name in names:
            await _lived(swarm, name).wait()


def _lived(swarm: Swarm, name: str) -> trio.Event:
    return swarm.done.setdefault(f"{name} lived", trio.Event())


def start(swarm: Swarm, name: str, loop: Loop, live: Live, **settings: Any) -> None:
    """A peer with this loop, by default in a group of two, that stays when it has lived; `wrap` makes its caller."""
    wrap = settings.pop("wrap", lambda rpc: rpc)

    async def main() -> None:
        own = {"config": CONFIG, "name": "run", "optimizer": loop.optimizer, "device": InlineDevice(), **settings}
        async with (
            open_place(swarm, name) as place,
            open_tree_averager(peer_at(place, wrap), loop.params, **own) as averager,
        ):
            await live(averager, loop)
            swarm.done[name] = averager
            _lived(swarm, name).set()
            await trio.sleep_forever()

    swarm.network.start(name, main)


def live_together(
    lives: Mapping[str, tuple[Loop, Live]],
    *,
    donors: Sequence[str] = (),
    until: Sequence[str] = (),
    beside: Callable[[Swarm], Awaitable[None]] | None = None,
    **settings: Any,
) -> list[TreeAverager]:
    """Run peers in virtual time until those named in `until`, or all, have lived; the averagers of these. Donors hand
    out the state of their loop, and `beside` runs when all have begun."""
    averagers: list[TreeAverager] = []

    async def body(swarm: Swarm) -> None:
        for name, (loop, live) in lives.items():
            state = {"state": lambda loop=loop: loop.state} if name in donors else {}
            start(swarm, name, loop, live, **state, **settings)
        if beside is not None:
            await beside(swarm)
        await swarm_lived(swarm, *(until or lives))
        averagers.extend(swarm.done[name] for name in until or lives)

    in_swarm(body)
    return averagers
