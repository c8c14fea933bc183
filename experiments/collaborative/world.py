"""Peers of unequal speed and lines that train together in virtual time, with the code that real ones run.

What a micro-batch costs is a number of the world; its gradient is really computed. Every peer writes down what it did,
so that one machine can be given the same samples afterwards (`one_machine`).
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.collaboration import Collaboration, CollaborationConfig, GlobalStep, open_collaboration
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.optim import Collaborative
from dmoe_jax.peers.peer import SIM_PORT, PeerConfig, open_peer
from dmoe_net import Address, HostDown, HostOptions, HostUp, NetError, SimNetwork, Speeds

ROOT = "root"
"""The host through which everybody joins; it trains nothing and never fails."""

_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Parameters, gradients and optimisers of a training."""

    params: PyTree
    """To begin with."""
    gradient: Callable[[PyTree, str, int, int], PyTree]
    """(params, peer, number, count) -> mean gradient of micro-batch `number` of a peer, of `count` samples."""
    batch_gradient: Callable[[PyTree, Sequence[tuple[str, int, int]]], PyTree]
    """(params, [(peer, number, count)]) -> mean gradient of all these micro-batches in one batch."""
    together: Collaborative
    """The optimiser of the swarm."""

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The one inside."""
        return self.together.inner


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpec:
    """A machine."""

    name: str
    """Its host."""
    sample_s: float
    """Seconds of computing a sample."""
    micro_batch: int = 4
    """Samples of a micro-batch."""
    client: bool = False
    """True if nobody can call it."""
    line: HostOptions = field(default_factory=HostOptions)
    """Its connection."""

    @property
    def speeds(self) -> Speeds:
        """Speeds that it reports of its line, bytes a second; None in a direction without limit."""
        up, down = (rate / 8 if rate < math.inf else None for rate in (self.line.up_bps, self.line.down_bps))
        return Speeds(up=up, down=down)


def lines_of(specs: Sequence[PeerSpec]) -> Callable[[str], HostOptions]:
    """Return the connections of these machines by host, for `simulate(hosts=...)`; others have no limit."""
    lines = {spec.name: spec.line for spec in specs}
    return lambda name: lines.get(name, HostOptions())


@dataclass(slots=True, eq=False)
class Life:
    """Record of what one process of a machine did, kept beyond its end."""

    name: str
    """Name of its peer: the machine's, and which of its processes this is."""
    spec: PeerSpec
    began: float
    """Time of its first micro-batch."""
    peer: Collaboration | None = None
    steps: list[GlobalStep] = field(default_factory=list)
    stepped_at: list[float] = field(default_factory=list)
    """Virtual time of each of `steps`."""
    params: dict[int, PyTree] = field(default_factory=dict)
    """Step -> parameters after it, if they are kept."""
    chains: dict[int, bytes] = field(default_factory=dict)
    """Step -> chain after it."""
    batches: dict[int, list[int]] = field(default_factory=dict)
    """Step, from 1 -> micro-batches that were gathered for it."""
    computed: int = 0
    """Samples, whatever became of them."""
    ended: float | None = None
    """When it was killed."""

    @property
    def stepped(self) -> set[int]:
        """Steps that it made itself."""
        return {each.number for each in self.steps}

    def made(self, done: GlobalStep) -> None:
        """Write down a global step."""
        self.steps.append(done)
        self.stepped_at.append(trio.current_time())
        if self.peer is not None:
            self.chains[done.number] = self.peer.standing.chain

    def gathered(self, number: int) -> int:
        """Samples that it gathered for step `number`."""
        return self.spec.micro_batch * len(self.batches.get(number, []))

    def idle_share(self, now: float) -> float:
        """Share of its time since its first micro-batch in which it computed nothing."""
        lived = (now if self.ended is None else self.ended) - self.began
        return 1 - self.computed * self.spec.sample_s / lived if lived > 0 else 0.0


class World:
    """Machines on a simulated network.

    Args:
      network: whose hosts the machines are.
      keep: whether parameters are kept after each step.
      on_step: called with the life of every peer that makes a step, and the step, once the life has its parameters.
    """

    def __init__(
        self,
        network: SimNetwork,
        problem: Problem,
        *,
        config: CollaborationConfig,
        seed: int = 0,
        keep: bool = True,
        last_step: int | None = None,
        on_step: Callable[["Life", GlobalStep], None] = lambda life, done: None,
    ) -> None:
        self.network, self.problem, self.config = network, problem, config
        self.lives: list[Life] = []
        """Lives of all machines, in the order in which they began."""
        self._seed, self._keep, self._last_step, self._tell = seed, keep, last_step, on_step
        self._stepped = trio.Event()

    async def open(self) -> None:
        """Start the host through which machines join."""
        ready = trio.Event()

        async def root() -> None:
            async with open_peer((), PeerConfig(network=self.network, host=ROOT, seed=self._seed)):
                ready.set()
                await trio.sleep_forever()

        self.network.start(ROOT, root)
        await ready.wait()

    def start(self, spec: PeerSpec) -> None:
        """Start a machine; it starts again whenever it comes up again."""
        self.network.start(spec.name, self._live, spec)

    def kill(self, name: str, *, silent: bool = False) -> None:
        """A machine goes down in the middle of whatever it does."""
        for life in self.lives:
            if life.spec.name == name and life.ended is None:
                life.ended = trio.current_time()
        self.network.apply(HostDown(name, silent=silent))

    def revive(self, name: str) -> None:
        """It comes up again, as a peer that knows nothing."""
        self.network.apply(HostUp(name))

    @property
    def living(self) -> list[Life]:
        """Lives of the machines that are up."""
        return [life for life in self.lives if life.ended is None]

    @property
    def step(self) -> int:
        """The furthest step that somebody has made."""
        return max((life.peer.step for life in self.lives if life.peer is not None), default=0)

    async def wait_for_step(self, number: int) -> None:
        """Wait until somebody has made it."""
        while self.step < number:
            await self._stepped.wait()

    async def _live(self, spec: PeerSpec) -> None:
        number = sum(life.spec.name == spec.name for life in self.lives)
        life = Life(f"{spec.name}.{number}", spec, trio.current_time())
        self.lives.append(life)
        rng, listen = random.Random(f"{self._seed}/{life.name}"), None if spec.client else "auto"
        how: dict[str, Any] = {
            "together": self.problem.together,
            "name": "run",
            "config": replace(self.config, speeds=spec.speeds),
            "device": InlineDevice(),
            "on_step": partial(self._on_step, life),
        }
        while True:
            config = PeerConfig(network=self.network, host=spec.name, listen=listen, seed=rng.getrandbits(30))
            try:
                async with (
                    open_peer([Address(ROOT, SIM_PORT)], config) as place,
                    open_collaboration(replace(place, rng=rng), self.problem.params, **how) as peer,
                ):
                    await train(peer, life, self.problem, last_step=self._last_step, keep=self._keep)
                    return
            except NetError:
                await trio.sleep(_AGAIN_S)

    def _on_step(self, life: Life, done: GlobalStep) -> None:
        life.made(done)
        if life.peer is not None:
            self._tell(life, done)
        self._stepped.set()
        self._stepped = trio.Event()


async def train(
    peer: Collaboration,
    life: Life,
    problem: Problem,
    *,
    last_step: int | None = None,
    keep: bool = True,
    on_batch: Callable[[], None] | None = None,
) -> None:
    """Gather micro-batches, each of which takes the time that the machine needs for it.

    Args:
      life: what is written down; parameters if `keep` says so.
      last_step: after which the peer trains no more and stays as a donor; None: it goes on.
      on_batch: called after each micro-batch, before others can have it. The time is then a real one, and is measured.
    """
    life.peer, life.began = peer, trio.current_time()
    spec, number = life.spec, 0
    micro_batch_s = spec.sample_s * spec.micro_batch
    while last_step is None or peer.step < last_step:
        step = peer.step + 1
        grads = problem.gradient(peer.params, life.name, number, spec.micro_batch)
        await trio.sleep(micro_batch_s)
        life.computed += spec.micro_batch
        life.batches.setdefault(step, []).append(number)
        number += 1
        if on_batch is not None:
            on_batch()
        changed = await peer.add(grads, samples=spec.micro_batch, took_s=None if on_batch else micro_batch_s)
        if changed and keep:
            life.params[peer.step] = jax.tree.map(np.asarray, peer.params)
    await trio.sleep_forever()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A swarm beside one machine with the same samples."""

    difference: float
    """Largest difference of any peer's parameters after any step, relative to the largest parameter."""
    chains_apart: int
    """Steps after which peers were in several chains."""
    unexplained: tuple[int, ...]
    """Steps whose number of samples is not that of the members' micro-batches."""


def compare_with_one_machine(
    problem: Problem, lives: Sequence[Life], last_step: int, *, delayed: bool = False
) -> Comparison:
    """Give one process the samples of every step in one batch, and compare.

    With delayed updates the gradient of a step is that of the parameters two steps before it, and a peer has made one
    step less when its batch is complete.
    """
    params, state = problem.params, problem.optimizer.init(problem.params)
    before, apart, largest, unexplained = params, 0, 0.0, []
    for number in range(1, last_step + 1):
        there = members_of(lives, number)
        if there is None:
            unexplained.append(number)
            break
        micro_batches = [(life.name, each, life.spec.micro_batch) for life in there for each in life.batches[number]]
        grads = problem.batch_gradient(before if delayed else params, micro_batches)
        updates, state = problem.optimizer.update(grads, state, params)
        before, params = params, optax.apply_updates(params, updates)
        for life in lives:
            if number in life.params:
                expected = before if delayed else params
                largest = max(largest, relative_difference(life.params[number], expected))
        apart += len({life.chains[number] for life in lives if number in life.chains}) > 1
    return Comparison(difference=largest, chains_apart=apart, unexplained=tuple(unexplained))


def members_of(lives: Sequence[Life], number: int) -> list[Life] | None:
    """Return the lives whose samples are in a step: of those who made it, and of as many that died in it as its sum
    tells. None if nothing explains the sum."""
    sure = [life for life in lives if number in life.stepped]
    whole = {round(each.samples) for life in sure for each in life.steps if each.number == number}
    maybe = [life for life in lives if life not in sure and life.ended is not None and life.gathered(number)]
    for chosen in range(2 ** len(maybe)):
        there = sure + [life for place, life in enumerate(maybe) if chosen >> place & 1]
        if {sum(life.gathered(number) for life in there)} == whole:
            return there
    return None


def relative_difference(one: PyTree, other: PyTree) -> float:
    """Return the largest difference of two trees, relative to the largest number of the second."""
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    scale = max(float(np.abs(right).max()) for _, right in pairs)
    return max(float(np.abs(np.asarray(left) - np.asarray(right)).max()) for left, right in pairs) / scale
