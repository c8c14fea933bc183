"""A stack of remote layers and the trainers that send batches through it, in virtual time or on real computing.

Both are the same code: nodes, requests, batches, RPC and mixtures of the library, with one expert for each layer.
They differ in the network (`SimNetwork`, or TCP on loopback), the device (`InlineDevice` with measured costs, or a
`ThreadDevice`) and the expert (a stand-in that returns its input, or the block itself).
"""

import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from statistics import mean
from typing import cast

import jax
import numpy as np
import optax
import trio

from dmoe_jax import Swarm, open_swarm
from dmoe_jax.experts.base import Expert
from dmoe_jax.machine.device import Device, InlineDevice
from dmoe_jax.mixture.remote import Choice, RemoteMixture, Residual
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.programs import buckets_up_to
from dmoe_jax.peers.peer import SIM_PORT, Seams
from dmoe_jax.routing.base import Scores
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.swarm.serving import Served
from dmoe_net.identity import Address, PeerId
from dmoe_net.keys import Identity
from dmoe_net.rpc.faults import Fault, FaultInjector, FaultPlan
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.sim import Constant, run, simulate
from dmoe_net.transport.sim.network import SimNetwork
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.types import Array
from experiments.throughput_vs_latency.costs import (
    OPTIMIZER,
    STAND_IN,
    CostTable,
    TimedDevice,
    echo_of,
    expert_of,
    random_inputs,
    warm_backend,
)
from experiments.throughput_vs_latency.settings import Block, Delay, Load, Method, Passes

_ROUTER = product_key((1,))
_TIMEOUT_S = 600.0
"""No call takes so long: a batch waits for every layer."""
_ECHO_DELAY_S = 0.02
"""Delay of calls whose travelling is timed, seconds."""
_BREAK_S = 0.5
"""After a load, for the batches that run when trainers stop: `on_done` may hold the event loop up."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Throughput that trainers achieved.

    Attributes:
      samples_per_s: rows that went through the whole stack.
      requests_per_batch: trainers' requests that the servers joined into one batch, on average.
    """

    samples_per_s: float
    requests_per_batch: float


class Delays(FaultInjector):
    """Serves every layer call of one server late."""

    def __init__(self, host: str, *, seed: int) -> None:
        super().__init__(FaultPlan())
        self._name = f"{seed}/{host}"
        self.become(Delay(0.0))

    def become(self, delay: Delay) -> None:
        """Draw from this delay from now on: the n-th call is as late in every run with the same seed."""
        self._delay, self._rng = delay, random.Random(f"{self._name}/{delay.mean_s}")

    def of(self, server: PeerId) -> "Delays":
        return self

    def draw(self, caller: PeerId, method: str) -> tuple[Fault, float] | None:
        is_layer_call = method in ("expert.forward", "expert.backward")
        return (Fault.LATE, self._delay.draw_s(self._rng)) if is_layer_call else None


OnDone = Callable[[Method, Load, Throughput], None]
"""Told of each load when it has been measured."""


def measure_virtual(
    block: Block, grid: Sequence[tuple[Method, Load]], costs: CostTable, on_done: OnDone, *, seed: int
) -> None:
    """Measure loads in virtual time, on devices that take as long as `costs` says."""

    async def measure(loads: list[tuple[Method, Load]]) -> None:
        place = loads[0][1].place
        async with simulate(seed=seed, latency=Constant(place.round_trip_s / 2), tick_s=0.0) as network:
            devices = [InlineDevice(costs) for _ in range(1 if place.shared_device else place.servers)]
            await _measure(STAND_IN, None, block.batch_rows, loads, devices, network, on_done, seed=seed)

    for _, loads in itertools.groupby(grid, lambda pair: pair[1].place):
        run(measure, list(loads), seed=seed)


def measure_real(
    block: Block, grid: Sequence[tuple[Method, Load]], device: Device, on_done: OnDone, *, seed: int
) -> None:
    """Measure loads of one place on this machine's device, all servers and trainers in this process, joined by TCP."""
    _measure_real(expert_of(block), OPTIMIZER, block.batch_rows, grid, device, on_done, seed=seed)


def measure_round_trips(block: Block, grid: Sequence[tuple[Method, Load]], *, seed: int) -> dict[Passes, float]:
    """Seconds that a call takes over TCP on loopback beside the delay and the time for which it has the device.

    Measured one call at a time, with the same tensors, the same delay for each, and an expert that returns what it
    gets. A call is late from its beginning on, so that most of its tensors travel meanwhile.

    Args:
      grid: loads of one place.
    """
    alone = {
        load.passes: replace(load, trainers=1, delay=Delay(_ECHO_DELAY_S, 0.0), calls=5 * load.calls_per_batch)
        for _, load in grid
    }
    found: dict[Passes, float] = {}
    device = TimedDevice()

    def note(method: Method, load: Load, echoed: Throughput) -> None:
        taken = device.taken()
        kinds = [taken.get(kind, {}).values() for kind in ("forward", "backward")]
        on_device = mean(seconds for sizes in kinds for each in sizes for seconds in each)
        whole = block.batch_rows / (echoed.samples_per_s * load.calls_per_batch)
        found[load.passes] = max(0.0, whole - _ECHO_DELAY_S - on_device)

    loads: list[tuple[Method, Load]] = [("model_parallel", load) for load in alone.values()]
    _measure_real(echo_of(expert_of(block)), None, block.batch_rows, loads, device, note, seed=seed)
    return found


def _measure_real(
    expert: Expert,
    optimizer: optax.GradientTransformation | None,
    batch_rows: int,
    grid: Sequence[tuple[Method, Load]],
    device: Device,
    on_done: OnDone,
    *,
    seed: int,
) -> None:
    warm_backend(expert, optimizer, [batches * batch_rows for batches in buckets_up_to(grid[0][1].joined)])

    async def measure() -> None:
        await _measure(expert, optimizer, batch_rows, grid, [device], None, on_done, seed=seed)

    trio.run(measure)


async def _measure(
    expert: Expert,
    optimizer: optax.GradientTransformation | None,
    batch_rows: int,
    grid: Sequence[tuple[Method, Load]],
    devices: Sequence[Device],
    network: SimNetwork | None,
    on_done: OnDone,
    *,
    seed: int,
) -> None:
    """Open servers and the trainers' client, and measure one load after the other.

    Args:
      grid: loads of one place.
      devices: of the servers, in turn.
    """
    place, most = grid[0][1].place, grid[0][1].joined * batch_rows
    trainers = max(load.trainers for _, load in grid)
    node = NodeConfig(
        max_batch_rows=most,
        warm_up_rows=0,  # the sizes that occur are compiled already
        max_waiting_rows=max(most, trainers * batch_rows),
        max_concurrent_calls=2 * trainers,
        # Nodes that stay: they need not say so every ten seconds.
        announce_period_s=100.0,
        record_lifetime_s=300.0,
    )
    async with AsyncExitStack() as stack:
        servers: list[tuple[Served, Delays]] = []
        join: tuple[str, ...] = ()
        for index in range(place.servers):
            host = f"server{index}"
            delays, device = Delays(host, seed=seed), devices[index % len(devices)]
            swarm = await stack.enter_async_context(_open(join, host, network, device, delays, seed=seed))
            own = {f"block{layer}.[0:1]": expert for layer in range(index, place.layers, place.servers)}
            servers.append((await swarm.serve(own, optimizer=optimizer, config=node), delays))
            join = join or (swarm.contact,)
        # Trainers compute nothing here.
        swarm = await stack.enter_async_context(_open(join, "trainers", network, InlineDevice(), None, seed=seed))
        layers = [await _layer(swarm, f"block{layer}", expert, batch_rows) for layer in range(place.layers)]
        for method, load in grid:
            for _, delays in servers:
                delays.become(load.delay)
            served = [each for each, _ in servers]
            found = await _throughput(layers, random_inputs(expert, batch_rows), load, served)
            if swarm.statistics.failed:
                raise RuntimeError(f"layer calls failed: {swarm.statistics.failures}")
            await trio.sleep(_BREAK_S)
            on_done(method, load, found)


async def _throughput(
    layers: Sequence["_Layer"], batch: Sequence[Array], load: Load, served: Sequence[Served]
) -> Throughput:
    """Let the trainers work until enough calls are done, and time these."""
    meter, before = Meter(load), _batches(served)
    async with trio.open_nursery() as nursery:
        for index in range(load.trainers):
            start = index * load.calls_per_batch // load.trainers
            nursery.start_soon(_train, layers, batch, load, start, meter)
        await meter.done.wait()
        nursery.cancel_scope.cancel()
    return Throughput(
        samples_per_s=len(batch[0]) * meter.calls_per_s / load.calls_per_batch,
        requests_per_batch=meter.calls / (_batches(served) - before),
    )


class Meter:
    """Times layer calls: those of the warm-up are left out, and `done` is set when there are enough."""

    def __init__(self, load: Load) -> None:
        self.done = trio.Event()
        self._first, self._last = load.warm_up_calls, load.warm_up_calls + load.calls
        self.calls = 0
        """Layer calls that were answered, those of the warm-up too."""
        self._started_at = self._ended_at = trio.current_time()

    def note_start(self) -> None:
        """The first call is about to be placed."""
        if not self.calls:
            self._started_at = trio.current_time()

    def note_call(self) -> None:
        """A layer call was answered."""
        self.calls += 1
        if self.calls == self._first:
            self._started_at = trio.current_time()
        elif self.calls == self._last:
            self._ended_at = trio.current_time()
            self.done.set()

    @property
    def calls_per_s(self) -> float:
        """Number of timed calls a second."""
        return (self._last - self._first) / (self._ended_at - self._started_at)


@asynccontextmanager
async def _open(
    join: Sequence[str], host: str, network: SimNetwork | None, device: Device, delays: Delays | None, *, seed: int
) -> AsyncIterator[Swarm]:
    """Open a server, or without delays the trainers' client."""
    identity = Identity.from_seed(random.Random(f"{seed}/{host}").randbytes(32))
    transport = TcpTransport() if network is None else network.transport(host, identity.peer_id)
    here = None
    if delays is not None:
        here = Address("127.0.0.1", 0) if network is None else Address(host, SIM_PORT)
    async with (
        open_rpc_peer(transport, peer_id=identity.peer_id, listen=here, faults=delays) as rpc,
        open_swarm(
            join,
            network=network,
            host=host,
            device=device,
            seed=seed,
            testing=Seams(caller=rpc, identity=identity),
        ) as swarm,
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
    logits = cast(jax.Array, np.zeros((batch_rows, 1), np.float32))  # `choose` takes arrays on the host
    return _Layer(mixture, await mixture.choose(Scores((logits,))))


async def _train(layers: Sequence[_Layer], batch: Sequence[Array], load: Load, start: int, meter: Meter) -> None:
    """Send a batch through the stack again and again, one layer after the other.

    Args:
      start: the layer call of the first batch to begin with. Trainers begin at different places, as asynchronous ones
        that have run for a while; at one place, all of them would queue at the same server.
    """
    residuals = [Residual(batch, list(layer.choice.calls), {}) for layer in layers]
    gradient = np.full_like(batch[0], 1e-3)
    hidden, grads = batch[0], gradient
    for number in itertools.count(start):
        place = number % load.calls_per_batch
        meter.note_start()
        if place < len(layers):
            hidden = batch[0] if place == 0 else hidden
            layer = layers[place]
            outputs, _, residuals[place] = await layer.mixture.forward(layer.choice, [hidden, *batch[1:]])
            hidden = outputs[:, 0]
        else:
            index = load.calls_per_batch - 1 - place
            grads = gradient if place == len(layers) else grads
            input_grads = await layers[index].mixture.backward(residuals[index], grads[:, None])
            grads = cast(Array, input_grads[0])
        meter.note_call()


def _batches(served: Sequence[Served]) -> int:
    """Batches that the servers have computed so far."""
    return sum(each.node.status()["batches"] for each in served)
