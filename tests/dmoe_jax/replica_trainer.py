"""A process of a replica for `test_replica_trainer`: its trunk lies on the devices of all of its processes, its experts
on a node elsewhere. `replica_trainer_process` starts it.

It prints a line of JSON for each thing that the test wants to know.
"""

from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np
import optax
import trio

from dmoe_jax import moshpit_average
from dmoe_jax.averaging import TreeAveragerConfig
from dmoe_jax.collaboration import CollaborationConfig
from dmoe_jax.experts.base import Expert
from dmoe_jax.machine.device import ThreadDevice
from dmoe_jax.models.mlp import MLP, Batch, MLPConfig
from dmoe_jax.peers.security import Plain
from dmoe_jax.routing.base import Router
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.routing.registry import make_router
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.swarm import Swarm
from dmoe_jax.trunk import open_trunk_averaging
from dmoe_net.errors import NetError
from tests.dmoe_jax.replica_process import pieces_of, say

GRID = (3, 2)
CONFIG = MLPConfig(input_dim=8, num_classes=3, d_model=16, num_layers=2, grid_size=GRID, k_best=2)
STEPS = 20
ROWS = 16
EXPERT_OPTIMIZER = optax.chain(optax.trace(decay=1.0), optax.scale(0.0))
"""Experts add their gradients up, and stay: two calls with half of the rows each then are one call with all of them."""


def experts() -> dict[str, Expert]:
    """Not made with the module, for JAX is not set up then."""
    return {f"layer{layer}.[0:3].[0:2]": CONFIG.expert() for layer in range(2)}


def batches(rows: int = ROWS, *, first: int = 0, number: int = 10**6) -> Iterator[Batch]:
    for count in range(first, first + number):
        x = np.random.default_rng(count).normal(size=(rows, 8)).astype(np.float32)
        yield Batch(x, (x[:, 0] > x[:, 1]).astype(np.int32) + (x[:, 2] > 1))


def model_of(swarm: Swarm, router: Router, **options: Any) -> MLP:
    return MLP.on(swarm, CONFIG, router, **{"grace_s": 5.0, "timeout_s": 20.0} | options)


async def train(swarm: Swarm, router: Router, mesh: str | None, rows: int) -> tuple[Any, dict[str, Any]]:
    """The trainers after some steps, and what was lost on the way."""
    losses: list[float] = []
    trainers = swarm.trainer(model_of(swarm, router), optax.adam(1e-2, eps=1e-4), batches(rows), mesh=mesh, seed=3)
    await trainers.run(STEPS, on_step=lambda record: losses.append(record.loss))
    evaluation = await trainers.evaluate(list(batches(rows, first=100, number=2)))
    return trainers, {"losses": losses, "evaluated": evaluation.loss}


async def exact(swarm: Swarm, settings: dict[str, Any]) -> None:
    trainers, told = await train(swarm, make_router(settings["router"], GRID), settings["mesh"], settings["rows"])
    counted = {"samples": swarm.statistics.samples, "failed": swarm.statistics.failed, "load": swarm.statistics.load}
    say(mode="exact", pieces=pieces_of(trainers.state()), **counted, **told)


async def failing(swarm: Swarm, settings: dict[str, Any]) -> None:
    """In process 1 calls come to nothing once, then the batches end early."""
    lost: list[str] = []
    model = model_of(swarm, product_key(GRID), on_shortfall="raise")
    number = 6 if settings["index"] else 100
    trainers = swarm.trainer(model, optax.adam(1e-2), batches(number=number), mesh=settings["mesh"])
    await trainers.run(2)
    caller = cast(Any, model.mixtures[1])._caller
    fan_out = caller.fan_out

    async def nothing(method: str, calls: Any, **options: Any) -> list[None]:
        caller.fan_out = fan_out
        return [None] * len(calls)

    if settings["index"] == 1:
        caller.fan_out = nothing
    await trainers.run(50, on_lost=lambda trainer, error: lost.append(f"{type(error).__name__}: {error}"))
    say(mode="failing", lost=lost, step=trainers.step)


async def refused(swarm: Swarm, settings: dict[str, Any]) -> None:
    """Trainers that will not do, and batches that are not the same."""
    model, said = model_of(swarm, product_key(GRID)), []
    try:
        swarm.trainer(model, optax.sgd(0.1), [batches(), batches()], mesh=settings["mesh"])
    except ValueError as error:
        said.append(str(error))
    different = swarm.trainer(model, optax.sgd(0.1), batches(first=settings["index"]), mesh=settings["mesh"])
    try:
        await different.run(3)
    except ValueError as error:
        said.append(str(error))
    say(mode="refused", said=said)


async def stopped(swarm: Swarm, settings: dict[str, Any]) -> None:
    """Process 1 is cancelled in the middle of a step."""
    trainers = swarm.trainer(model_of(swarm, product_key(GRID)), optax.adam(1e-2), batches(), mesh=settings["mesh"])
    error = ""
    with trio.CancelScope() as scope:
        if settings["index"] == 1:
            model = trainers.model.mixtures[0]  # type: ignore[attr-defined]
            choose = model.choose

            async def cancelling(scores: Any) -> Any:
                if trainers.step == 4:
                    scope.cancel()
                return await choose(scores)

            model.choose = cancelling
        try:
            await trainers.run(50)
        except NetError as lost:
            error = f"{type(lost).__name__}: {lost}"
    say(mode="stopped", step=trainers.step, error=error, cancelled=scope.cancelled_caught)


async def killed(swarm: Swarm, settings: dict[str, Any]) -> None:
    trainers = swarm.trainer(model_of(swarm, product_key(GRID)), optax.adam(1e-2), batches(), mesh=settings["mesh"])
    try:
        await trainers.run(10**6, on_step=lambda record: say(step=record.step))
    except NetError as lost:
        say(mode="killed", error=f"{type(lost).__name__}: {lost}")


async def averaging(swarm: Swarm, settings: dict[str, Any]) -> None:
    """Average parameters with another replica beside training; end when enough averages were made."""
    optimizer = moshpit_average(optax.adam(1e-2), every=3)
    own = batches(first=1000 * settings["replica"])
    trainers = swarm.trainer(model_of(swarm, product_key(GRID)), optimizer, own, mesh=settings["mesh"])
    config = TreeAveragerConfig(side=2, window_s=3.0, timeout_s=60.0)
    structure: Any = jax.tree.structure(trainers.state())
    async with open_trunk_averaging(swarm.peer, trainers.trunk, name="trunk", config=config) as averager:
        while averager.totals.done < settings["averages"]:
            await trainers.run(1)
            assert averager.loop is not None
            say(rounds=averager.loop.version)
        totals = {"taken": averager.totals.states_taken, "met": averager.totals.peers_met}
    assert jax.tree.structure(trainers.state()) == structure  # as checkpoints need it
    say(mode="averaging", pieces=pieces_of(trainers.params), step=trainers.step, **totals)


async def collaborating(swarm: Swarm, settings: dict[str, Any]) -> None:
    """Gather one large batch with another replica."""
    own = batches(first=1000 * settings["replica"])
    config = CollaborationConfig(lead_s=1.0, late_s=60.0)
    model = model_of(swarm, product_key(GRID))
    async with swarm.collaborate(
        model, optax.adam(1e-2), own, mesh=settings["mesh"], target_batch_size=2 * ROWS, name="batch", config=config
    ) as trainers:
        await trainers.run(settings["steps"] - trainers.step)
        chain, alone = trainers.peer.standing.chain.hex(), trainers.peer.totals.alone
        say(mode="collaborating", pieces=pieces_of(trainers.params), step=trainers.step, chain=chain, alone=alone)


MODES = {"exact": exact, "failing": failing, "refused": refused, "stopped": stopped, "killed": killed}
MODES |= {"averaging": averaging, "collaborating": collaborating}


async def main(settings: dict[str, Any]) -> None:
    async with open_swarm(settings["join"], listen="127.0.0.1:0", security=Plain(), device=ThreadDevice()) as swarm:
        for mode in settings["modes"]:
            await MODES[mode](swarm, settings)
