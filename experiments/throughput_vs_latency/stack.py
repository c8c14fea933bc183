"""A stack of remote layers and the trainers that send batches through it, in virtual time or on real computing.

Both are the same code: nodes, requests, batches, RPC and mixtures of the library, with one expert for each layer.
They differ in the network (`SimNetwork`, or TCP on loopback), the device (`InlineDevice` with measured costs, or a
`ThreadDevice`) and the expert (a stand-in that returns its input, or the block itself).
"""

import itertools
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from statistics import mean
from typing import Any, cast

import numpy as np
import optax
import trio

from dmoe_jax import NodeConfig, RemoteMixture, Swarm, open_swarm, product_key
from dmoe_jax.experts import Expert, TensorSpec, make_expert
from dmoe_jax.machine.device import Device, InlineDevice
from dmoe_jax.mixture.remote import Choice, Residual
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.peers.peer import SIM_PORT, Seams
from dmoe_jax.routing import Scores
from dmoe_net import (
    Address,
    Constant,
    Fault,
    FaultInjector,
    FaultPlan,
    Identity,
    PeerId,
    SimNetwork,
    TcpTransport,
    open_rpc_peer,
    run,
    simulate,
)
from experiments.throughput_vs_latency.costs import OPTIMIZER, Costs, Taken, TimedDevice, cost_of, random_inputs
from experiments.throughput_vs_latency.settings import JOINED, Block, Delay, Load

_ECHO_DELAY_S = 0.02
"""Delay of calls whose travelling is timed, seconds."""

_NUMBER = TensorSpec(name="number", shape=(1,), dtype="float32", differentiable=True)
STAND_IN = Expert("stand_in", lambda key: {}, lambda params, number: number, (_NUMBER,), _NUMBER)
"""Expert that nodes serve in virtual time: one number for each row, returned as it came."""

_Layer = tuple[RemoteMixture, Choice]
"""A layer as trainers call it, and the choice of its one expert."""


class Delays(FaultInjector):
    """Serves every layer call late."""

    def become(self, delay: Delay, seed: int) -> None:
        """Draw from this delay from now on: the n-th call is as late in every run with the same seed."""
        self._delay, self._rng = delay, random.Random(f"{seed}/{delay.mean_s}")

    def of(self, server: PeerId) -> "Delays":
        return self

    def draw(self, caller: PeerId, method: str) -> tuple[Fault, float] | None:
        is_layer_call = method in ("expert.forward", "expert.backward")
        return (Fault.LATE, self._delay.draw_s(self._rng)) if is_layer_call else None


def measure_virtual(
    loads: Sequence[Load], block: Block, costs: Costs, *, seed: int, real_trip_s: float | None = None
) -> list[float]:
    """Rows a second that go through the whole stack in virtual time, on devices that take as long as `costs` says.

    Args:
      loads: one after the other, of as many layers and servers.
      real_trip_s: for the twin of a real run, in which all servers share a device: what a call and its answer take
        there beside the delay and the device. None: no time, and each server has a device.
    """

    async def measure() -> list[float]:
        async with simulate(seed=seed, latency=Constant((real_trip_s or 0.0) / 2), tick_s=0.0) as network:
            devices = [
                InlineDevice(partial(cost_of, costs)) for _ in range(loads[0].servers if real_trip_s is None else 1)
            ]
            return await _measure(loads, STAND_IN, None, block.rows, devices, network, seed=seed)

    return run(measure, seed=seed)


def measure_real(load: Load, block: Block, *, seed: int) -> tuple[float, Taken]:
    """Rows a second on this machine's device, servers and trainers in this process, joined by TCP; and how long batches
    had the device. `measure_costs` has compiled the block's programs."""
    expert, device = make_expert(block.kind, **block.config), TimedDevice()
    (rate,) = trio.run(partial(_measure, [load], expert, OPTIMIZER, block.rows, [device], None, seed=seed))
    return rate, device.taken


def measure_round_trip(load: Load, block: Block, *, seed: int) -> float:
    """Seconds that a call takes over TCP on loopback beside the delay and the time for which it has the device.

    Measured one call at a time, with the block's tensors, the same delay for each, and an expert that returns what it
    gets. A call is late from its beginning on, so that most of its tensors travel meanwhile.
    """
    echo, device = _echo(make_expert(block.kind, **block.config)), TimedDevice()
    ExpertBackend(echo, None, {}).warm_up_bucket(block.rows)
    alone = replace(load, delay=Delay(_ECHO_DELAY_S, 0.0)).with_one_in_flight(5 * load.calls_per_batch)
    (rate,) = trio.run(partial(_measure, [alone], echo, None, block.rows, [device], None, seed=seed))
    kinds = ("forward", "backward")
    on_device = mean(seconds for (name, _), taken in device.taken.items() if name in kinds for seconds in taken)
    return max(0.0, block.rows / (rate * load.calls_per_batch) - _ECHO_DELAY_S - on_device)


@cache
def _echo(expert: Expert) -> Expert:
    """An expert with the same inputs that returns the first of them: a call costs what it costs to travel."""
    return expert._replace(name="echo", init=lambda key: {}, apply=lambda params, first, *others: first)


async def _measure(
    loads: Sequence[Load],
    expert: Expert,
    optimizer: optax.GradientTransformation | None,
    rows: int,
    devices: Sequence[Device],
    network: SimNetwork | None,
    *,
    seed: int,
) -> list[float]:
    """Open servers and the trainers' client, and measure one load after the other; rows a second.

    Args:
      rows: of a trainer's batch.
      devices: of the servers, in turn.
    """
    num_layers, servers, trainers = loads[0].layers, loads[0].servers, max(load.trainers for load in loads)
    node = NodeConfig(
        max_batch_rows=JOINED * rows,
        warm_up_rows=0,  # the sizes that occur are compiled already
        strategy="single",  # as in `measure_costs`
        max_waiting_rows=max(JOINED, trainers) * rows,
        max_concurrent_calls=2 * trainers,
        # Nodes that stay: they need not say so every ten seconds.
        announce_period_s=100.0,
        record_lifetime_s=300.0,
    )
    delays, batch, rates = Delays(FaultPlan()), random_inputs(expert, rows), []
    opened = partial(open_delayed, network=network, seed=seed)
    async with AsyncExitStack() as stack:
        join: tuple[str, ...] = ()
        for index in range(servers):
            opening = opened(join, f"server{index}", device=devices[index % len(devices)], delays=delays)
            swarm = await stack.enter_async_context(opening)
            own = {f"block{layer}.[0:1]": expert for layer in range(index, num_layers, servers)}
            await swarm.serve(own, optimizer=optimizer, config=node)
            join = join or (swarm.contact,)
        # Trainers compute nothing here.
        swarm = await stack.enter_async_context(opened(join, "trainers", device=InlineDevice()))
        # A layer has a single expert, so that all batches make the same choice; and a batch waits for every layer.
        mixture = partial(swarm.mixture, k_best=1, grace_s=math.inf, timeout_s=600.0, on_shortfall="raise")
        router, layers = product_key((1,)), list[_Layer]()
        scores = Scores((cast(Any, np.zeros((rows, 1), np.float32)),))  # `choose` takes arrays on the host
        for number in range(num_layers):
            layer = mixture(f"block{number}", expert, router)
            layers.append((layer, await layer.choose(scores)))
        for load in loads:
            delays.become(load.delay, seed)
            rates.append(await _throughput(layers, batch, load))
            if swarm.statistics.failed:
                raise RuntimeError(f"layer calls failed: {swarm.statistics.failures}")
            await trio.sleep(0.5)  # for the batches that run when trainers stop
        return rates


@asynccontextmanager
async def open_delayed(
    join: Sequence[str],
    host: str,
    *,
    network: SimNetwork | None = None,
    device: Device | None = None,
    delays: Delays | None = None,
    seed: int,
) -> AsyncIterator[Swarm]:
    """Open a server on a simulated network or, without one, on loopback by TCP; without delays the trainers' client."""
    identity = Identity.from_seed(random.Random(f"{seed}/{host}").randbytes(32))
    transport = TcpTransport() if network is None else network.transport(host, identity.peer_id)
    here = None
    if delays is not None:
        here = Address("127.0.0.1", 0) if network is None else Address(host, SIM_PORT)
    async with open_rpc_peer(transport, peer_id=identity.peer_id, listen=here, faults=delays) as rpc:
        seams = Seams(caller=rpc, identity=identity)
        async with open_swarm(join, network=network, host=host, device=device, seed=seed, testing=seams) as swarm:
            yield swarm


async def _throughput(layers: Sequence[_Layer], batch: Sequence[np.ndarray], load: Load) -> float:
    """Let the trainers work until enough calls are answered; rows a second of those after the warm-up.

    Trainers begin at different places of the stack, as asynchronous ones that have run for a while; at one place, all
    of them would queue at the same server.
    """
    first, last = load.warm_up_calls, load.warm_up_calls + load.calls
    answered_at, enough = [trio.current_time()], trio.Event()
    gradient = np.full_like(batch[0], 1e-3)

    async def train(start: int) -> None:
        residuals = [Residual(batch, list(choice.calls), {}) for _, choice in layers]
        hidden, grads = batch[0], gradient
        for number in itertools.count(start):
            place = number % load.calls_per_batch
            if place < len(layers):
                mixture, choice = layers[place]
                inputs = [hidden if place else batch[0], *batch[1:]]
                outputs, _, residuals[place] = await mixture.forward(choice, inputs)
                hidden = outputs[:, 0]
            else:
                index = load.calls_per_batch - 1 - place
                grads = gradient if place == len(layers) else grads
                input_grads = await layers[index][0].backward(residuals[index], grads[:, None])
                grads = cast(np.ndarray, input_grads[0])
            answered_at.append(trio.current_time())
            if len(answered_at) > last:
                enough.set()

    async with trio.open_nursery() as nursery:
        for index in range(load.trainers):
            nursery.start_soon(train, index * load.calls_per_batch // load.trainers)
        await enough.wait()
        nursery.cancel_scope.cancel()
    calls_per_s = load.calls / (answered_at[last] - answered_at[first])
    return len(batch[0]) * calls_per_s / load.calls_per_batch
