"""Trainers that wait a second for each remote call: what the simulation costs beside the computing.

Both sides are the same XLA calls. A step of every trainer runs in the simulated swarm, where each of them waits in
virtual time. It runs once more, to the last bit alike, while its XLA calls are noted; then these are made again, in
the same order and with the same arrays, with nothing around them. (Not in the run that is measured: the notes keep all
arrays alive, and new memory for each of them made XLA itself 1.6 times as slow.)
"""

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import trio

from dmoe_jax import CallStatistics, DirectoryConfig, NodeConfig, autodiff, open_swarm, product_key
from dmoe_jax.data import SegmentStream
from dmoe_jax.directory.grid import layer_prefix
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.models import LayerConfig, TransformerXL, TransformerXLConfig, transformer_xl
from dmoe_jax.node.backend import ExpertBackend, make_backends
from dmoe_jax.peers.peer import Seams
from dmoe_jax.trainer import Trainer
from dmoe_jax.trunk import SharedTrunk
from dmoe_net import Address, Constant, Fault, FaultPlan, SimNetwork, run, simulate
from experiments.simulated_swarm import start_simulated_nodes

_NUM_NODES, _BATCH_SIZE = 8, 4
_MODEL = TransformerXLConfig(
    vocab_size=2000,
    num_layers=4,
    grid_size=(4, 4),
    k_best=2,
    cutoffs=(500,),
    layer=LayerConfig(d_model=128, num_heads=4, d_ff=512, seq_len=32, mem_len=32),
)
"""The demonstration's model: a step has two calls in a row for each layer, forward and backward."""
_OPTIMIZER = optax.adam(1e-3)  # one object: compiled programs are shared by the optimiser's identity

# Nodes that stay: announced every minute and looked up as often, not every few seconds as on a volunteer's machine.
_NODE_CONFIG = NodeConfig(max_batch_rows=16, announce_period_s=60.0, record_lifetime_s=300.0)
_DIRECTORY_CONFIG = DirectoryConfig(ttl_s=120.0, idle_s=600.0)

XlaCalls = list[Callable[[], object]]


@contextmanager
def recording(calls: XlaCalls) -> Iterator[None]:
    """Note every call of a trainer's segments and of the experts, in order, while the block runs."""

    def noted(function: Callable[..., Any], *, donated: int | None = None) -> Callable[..., Any]:
        """The function, noted; of the argument with number `donated` a copy is kept, for the arrays will be gone."""

        def call(*args: Any) -> Any:
            again = [jax.tree.map(np.array, arg) if number == donated else arg for number, arg in enumerate(args)]
            calls.append(lambda: jax.block_until_ready(function(*again)))
            return function(*args)

        return call

    programs_of = autodiff._programs_of

    def noted_programs_of(function: Callable[..., Any]) -> Any:
        programs = copy.copy(programs_of(function))
        vars(programs).update({name: noted(program) for name, program in vars(programs).items()})
        return programs

    with (
        mock.patch.object(autodiff, "_programs_of", noted_programs_of),
        mock.patch.object(autodiff, "_add", noted(autodiff._add)),
        mock.patch.object(autodiff, "_add_in_place", noted(autodiff._add_in_place, donated=0)),
        mock.patch.object(ExpertBackend, "forward", noted(ExpertBackend.forward)),
        mock.patch.object(ExpertBackend, "backward", noted(ExpertBackend.backward)),
    ):
        yield


def replay(calls: XlaCalls) -> float:
    """Make the calls again, one after the other; seconds of real time. Experts take their updates once more."""
    started = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - started


def measure_trainers(*, trainers: int, seed: int) -> dict[str, float]:
    """Let every trainer, on a host of its own, take a step in virtual time, then make the same XLA calls alone.

    Returns:
      `wall_s`: real seconds in the simulated swarm. `virtual_s`: seconds in the simulation. `calls`: expert calls
      placed and answered. `loss`: mean over the trainers, nats. `compute_s`: real seconds of the XLA calls alone.
      `trainers_ratio`: the simulation's time over the computing's.

    Raises:
      RuntimeError: the two runs were not alike.
    """
    calls: XlaCalls = []
    measured = run(_train, trainers, seed, nullcontext(), seed=seed)
    noted = run(_train, trainers, seed, recording(calls), seed=seed)
    if measured | {"wall_s": 0} != noted | {"wall_s": 0}:
        raise RuntimeError(f"two runs with one seed differ: {measured} and {noted}")
    compute_s = replay(calls)
    return measured | {"compute_s": compute_s, "trainers_ratio": measured["wall_s"] / compute_s}


async def _train(num_trainers: int, seed: int, during_step: AbstractContextManager[None]) -> dict[str, float]:
    """Start trainers of one trunk, each on a host of its own; once they know the experts, let each take a step."""
    router, device = product_key(_MODEL.grid_size), InlineDevice()
    trunk = SharedTrunk(transformer_xl.init_trunk(jax.random.key(seed), _MODEL, router), _OPTIMIZER, device)
    text = np.random.default_rng(seed).integers(0, _MODEL.vocab_size, max(200_000, 200 * num_trainers))
    rows, columns = _MODEL.grid_size
    patterns = [f"{layer_prefix(layer)}.[0:{rows}].[0:{columns}]" for layer in range(_MODEL.num_layers)]
    backends = make_backends(dict.fromkeys(patterns, _MODEL.expert()), _OPTIMIZER, seed=seed)
    next(iter(backends.values())).warm_up(_NODE_CONFIG.max_batch_rows)
    late = FaultPlan(rates={Fault.LATE: 1.0}, late_mean_s=1.0, methods=("expert.",), seed=seed)
    statistics, losses, trainers = CallStatistics(), list[float](), list[Trainer[Any, Any]]()
    all_ready = trio.Event()

    async def live(network: SimNetwork, index: int, join: Address) -> None:
        place: dict[str, Any] = {"network": network, "host": f"trainer{index}", "listen": None, "device": device}
        testing = Seams(statistics=statistics)
        async with open_swarm(join, **place, seed=seed, directory=_DIRECTORY_CONFIG, testing=testing) as swarm:
            stream = SegmentStream(
                text, batch_size=_BATCH_SIZE, seq_len=_MODEL.seq_len, shard=index, num_shards=num_trainers, seed=seed
            )
            for layer in range(_MODEL.num_layers):
                await swarm.directory.prefetch(layer_prefix(layer), _MODEL.grid_size)
            # Each expert has a delay of its own, as in the paper.
            model = TransformerXL.on(swarm, _MODEL, router, grace_s=math.inf, timeout_s=600.0, max_parts=1)
            trainers.append(Trainer(index, model, trunk, stream))
            if len(trainers) == num_trainers:
                all_ready.set()
            await trio.sleep_forever()

    async def step(trainer: Trainer[Any, Any]) -> None:
        losses.append((await trainer.step()).loss)

    async with simulate(seed=seed, latency=Constant(0.001)) as network:
        join = await start_simulated_nodes(
            network, backends, num_nodes=_NUM_NODES, seed=seed, faults=late, config=_NODE_CONFIG
        )
        for index in range(num_trainers):
            network.start(f"trainer{index}", live, network, index, join)
        await all_ready.wait()
        await trainers[0].step()  # compiles
        calls_before, started, started_virtual = statistics.ok, time.perf_counter(), trio.current_time()
        with during_step:
            async with trio.open_nursery() as nursery:
                for trainer in trainers:
                    nursery.start_soon(step, trainer)
        return {
            "wall_s": time.perf_counter() - started,
            "virtual_s": trio.current_time() - started_virtual,
            "calls": statistics.ok - calls_before,
            "loss": float(np.mean(losses)),
        }
