"""A stack of remote layers and the trainers that send batches through it, in virtual time or on real computing.

Both are the same code: nodes, requests, batches, RPC and mixtures of the library, with one expert for each layer.
They differ in the network (`SimNetwork`, or TCP on loopback), the device (`InlineDevice` with measured costs, or a
`ThreadDevice`) and the expert (a stand-in that returns its input, or the block itself).
"""

import itertools
import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
import optax
import trio

from dmoe_jax.device import Device, InlineDevice, ThreadDevice
from dmoe_jax.experts.base import Expert
from dmoe_jax.mixture.remote import Choice, RemoteMixture, Residual
from dmoe_jax.node.server import NodeConfig
from dmoe_jax.peer import SIM_PORT
from dmoe_jax.routing.base import Scores
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.swarm import Served, Swarm, open_swarm
from experiments.throughput_vs_latency.costs import OPTIMIZER, CostTable, expert_of, random_inputs, stand_in
from experiments.throughput_vs_latency.settings import JOINED_REQUESTS, Block, Delay, Load
from net.identity import Address, PeerId
from net.rpc.faults import Fault, FaultInjector, FaultPlan
from net.rpc.peer import open_rpc_peer
from net.transport.sim import Constant, run, simulate
from net.transport.sim.network import SimNetwork
from net.transport.tcp import TcpTransport
from net.types import Array

_ROUTER = product_key((1,))
_TIMEOUT_S = 600.0
"""No call takes so long: a batch waits for every layer."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """What trainers achieved.

    Attributes:
      samples_per_s: rows that went through the whole stack.
      requests_per_batch: trainers' requests that the servers joined into one batch, on average.
    """

    samples_per_s: float
    requests_per_batch: float


class Delays(FaultInjector):
    """Serves every layer call late. The n-th call that a server gets is as late in every run with the same seed."""

    def __init__(self, delay: Delay, *, seed: int, host: str) -> None:
        super().__init__(FaultPlan())
        self._delay = delay
        self._rng = random.Random(f"{seed}/{host}/delays")

    def of(self, server: PeerId) -> "Delays":
        return self

    def draw(self, caller: PeerId, method: str) -> tuple[Fault, float] | None:
        is_layer_call = method in ("expert.forward", "expert.backward")
        return (Fault.LATE, self._delay.draw_s(self._rng)) if is_layer_call else None


def virtual_throughput(block: Block, load: Load, costs: CostTable, *, seed: int) -> Throughput:
    """Measure in virtual time, on devices that take as long as `costs` says."""

    async def measure() -> Throughput:
        async with simulate(seed=seed, latency=Constant(0.0), tick_s=0.0) as network:
            devices = [InlineDevice(costs) for _ in range(1 if load.shared_device else load.servers)]
            return await _measure(stand_in(), None, block.batch_rows, load, devices, network, seed=seed)

    return run(measure, seed=seed)


def real_throughput(block: Block, load: Load, *, seed: int) -> Throughput:
    """Measure on this machine's device, all servers and trainers in this process, joined by TCP on loopback."""

    async def measure() -> Throughput:
        return await _measure(expert_of(block), OPTIMIZER, block.batch_rows, load, [ThreadDevice()], None, seed=seed)

    return trio.run(measure)


async def _measure(
    expert: Expert,
    optimizer: optax.GradientTransformation | None,
    batch_rows: int,
    load: Load,
    devices: Sequence[Device],
    network: SimNetwork | None,
    *,
    seed: int,
) -> Throughput:
    """Open servers and trainers, let them work until enough calls are done, and time these."""
    most = JOINED_REQUESTS[-1] * batch_rows
    node = NodeConfig(
        max_batch_rows=most,
        warm_up_rows=most,
        max_waiting_rows=max(most, load.trainers * batch_rows),
        max_concurrent_calls=load.trainers + 1,
    )
    meter = Meter(load)
    async with AsyncExitStack() as stack:
        served: list[Served] = []
        join: tuple[str, ...] = ()
        for index in range(load.servers):
            delays = Delays(load.delay, seed=seed, host=f"server{index}")
            device = devices[index % len(devices)]
            swarm = await stack.enter_async_context(_open(join, f"server{index}", network, device, delays, seed=seed))
            layers = range(index, load.layers, load.servers)
            own = {f"block{layer}.[0:1]": expert for layer in layers}
            served.append(await swarm.serve(own, optimizer=optimizer, config=node))
            join = join or (swarm.contact,)
        device = InlineDevice()  # trainers compute nothing here
        swarm = await stack.enter_async_context(_open(join, "trainers", network, device, None, seed=seed))
        layers = [await _layer(swarm, f"block{layer}", expert, batch_rows) for layer in range(load.layers)]
        before = _requests_and_batches(served)
        async with trio.open_nursery() as nursery:
            for index in range(load.trainers):
                start = index * load.calls_per_batch // load.trainers
                nursery.start_soon(_train, layers, random_inputs(expert, batch_rows), load, start, meter)
            await meter.done.wait()
            nursery.cancel_scope.cancel()
        if swarm.statistics.failed:
            raise RuntimeError(f"{swarm.statistics.failed} layer calls failed: {swarm.statistics.failures}")
        requests, batches = (after - then for after, then in zip(_requests_and_batches(served), before, strict=True))
    return Throughput(batch_rows * meter.calls_per_s / load.calls_per_batch, requests / batches)


class Meter:
    """Times layer calls: those of the warm-up are left out, and `done` is set when there are enough."""

    def __init__(self, load: Load) -> None:
        self.done = trio.Event()
        self._first, self._last = load.warm_up_calls, load.warm_up_calls + load.calls
        self._calls = 0
        self._started_at = self._ended_at = trio.current_time()

    def note_start(self) -> None:
        """The first call is about to be placed."""
        if not self._calls:
            self._started_at = trio.current_time()

    def note_call(self) -> None:
        """A layer call was answered."""
        self._calls += 1
        if self._calls == self._first:
            self._started_at = trio.current_time()
        elif self._calls == self._last:
            self._ended_at = trio.current_time()
            self.done.set()

    @property
    def calls_per_s(self) -> float:
        """Of the timed calls."""
        return (self._last - self._first) / (self._ended_at - self._started_at)


@asynccontextmanager
async def _open(
    join: Sequence[str], host: str, network: SimNetwork | None, device: Device, delays: Delays | None, *, seed: int
) -> AsyncIterator[Swarm]:
    """Open a server, or without delays the trainers' client."""
    peer_id = PeerId.draw(random.Random(f"{seed}/{host}"))
    transport = TcpTransport() if network is None else network.transport(host, peer_id)
    here = None
    if delays is not None:
        here = Address("127.0.0.1", 0) if network is None else Address(host, SIM_PORT)
    async with (
        open_rpc_peer(transport, peer_id=peer_id, listen=here, faults=delays) as rpc,
        open_swarm(join, caller=rpc, network=network, host=host, device=device, seed=seed) as swarm,
    ):
        yield swarm


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer as trainers call it. It has a single expert, so that all batches make the same choice."""

    mixture: RemoteMixture
    choice: Choice


async def _layer(swarm: Swarm, prefix: str, expert: Expert, batch_rows: int) -> _Layer:
    mixture = swarm.mixture(
        prefix, expert, _ROUTER, k_best=1, grace_s=math.inf, timeout_s=_TIMEOUT_S, on_shortfall="raise"
    )
    return _Layer(mixture, await mixture.choose(Scores((np.zeros((batch_rows, 1), np.float32),))))


async def _train(layers: Sequence[_Layer], batch: Sequence[Array], load: Load, start: int, meter: Meter) -> None:
    """Send a batch through the stack again and again, one layer after the other.

    Args:
      start: the layer call of the first batch to begin with. Trainers begin at different places, as asynchronous ones
        that have run for a while; at one place, all of them would queue at the same server.
    """
    residuals: Mapping[int, Residual] | dict[int, Residual]
    residuals = {n: Residual([(call, list(batch), None) for call in layer.choice.calls], {}) for n, layer in enumerate(layers)}
    gradient = np.full_like(batch[0], 1e-3)
    hidden, grads = batch[0], gradient
    for number in itertools.count(start):
        place = number % load.calls_per_batch
        meter.note_start()
        if place < load.layers:
            hidden = batch[0] if place == 0 else hidden
            layer = layers[place]
            outputs, _, residuals[place] = await layer.mixture.forward(layer.choice, [hidden, *batch[1:]])
            hidden = outputs[:, 0]
        else:
            index = load.calls_per_batch - 1 - place
            grads = gradient if place == load.layers else grads
            (grads, *_) = await layers[index].mixture.backward(residuals[index], grads[:, None])
        meter.note_call()


def _requests_and_batches(served: Sequence[Served]) -> tuple[int, int]:
    statuses = [each.node.status() for each in served]
    return sum(each["forward"] + each["backward"] for each in statuses), sum(each["batches"] for each in statuses)
