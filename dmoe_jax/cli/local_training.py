"""A whole swarm on this machine, started by one command: a DHT peer, expert nodes, trainer processes, and a view."""

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio
from rich.console import Console

from dmoe_jax.cli.common import UsageError
from dmoe_jax.cli.local_view import LocalView, TrainerWatch
from dmoe_jax.processes import (
    SwarmProcess,
    check_status,
    launch_nodes,
    one_core_each,
    open_local_swarm,
    trainer_folders,
)

LEAVE_TIMEOUT_S = 90.0
"""For ending all processes in order: trainers write their reports, nodes their checkpoints."""


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """What is to run."""

    hands: Sequence[Sequence[str]]
    """The experts of each node."""
    node_flags: Sequence[str]
    """Flags of `dmoe node` besides the experts and whom to join."""
    trainer_flags: Callable[[int], Sequence[str]]
    """Flags of `dmoe train` for each trainer process, besides the folder and whom to join."""
    num_trainers: int
    """Trainer processes."""
    num_steps: int
    """Trunk updates that each is to make."""
    out: Path
    """Run folder of the first trainer process; the others' and the logs lie beside it."""
    listen_flags: Sequence[str] = ()
    """Where those that listen are called."""
    network_flags: Sequence[str] = ()
    """Which network they are on."""

    @property
    def logs(self) -> Path:
        """Folder of the processes' logs."""
        return self.out.parent / f"{self.out.name}.logs"


@dataclass(slots=True)
class LocalTraining:
    """What runs. Made by `open_local_training`."""

    dht: SwarmProcess
    """The meeting point."""
    nodes: list[SwarmProcess]
    """Expert nodes; they may still compile."""
    trainers: list[SwarmProcess]
    """Trainer processes; they wait for experts by themselves."""
    watches: list[TrainerWatch] = field(default_factory=list)
    """How far each of them is."""

    async def trained(self) -> None:
        """Wait for the trainer processes to end; at once if there are none.

        Raises:
          ProcessFailed: one ended with an error of its own, or a node before it served.
        """
        async with trio.open_nursery() as nursery:
            for node in self.nodes:
                nursery.start_soon(node.ready)
            for trainer in self.trainers:
                check_status(trainer, await trainer.process.wait())
            nursery.cancel_scope.cancel()


def check_out(out: Path) -> Path:
    """The folder itself if it can be a new run's.

    Raises:
      UsageError: it is not a new or empty folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out must be a new or empty folder, {out} is not")
    return out


@asynccontextmanager
async def open_local_training(plan: LocalPlan, console: Console) -> AsyncIterator[LocalTraining]:
    """Start everything that the plan says, and show it; all processes are gone when the context ends.

    Trainers start together with the nodes: they read their text and wait for experts while those compile.

    Raises:
      ProcessFailed: the DHT peer did not start.
      UsageError: the folder for the logs cannot be made.
    """
    try:
        plan.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: cannot make {plan.logs}: {error.strerror}") from error
    folders = trainer_folders(plan.out, plan.num_trainers)
    watches = {f"trainer{index}": TrainerWatch(folder) for index, folder in enumerate(folders)}
    async with (
        open_local_swarm(plan.logs, one_core_each(), network_flags=plan.network_flags) as swarm,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(LocalView(console, swarm, watches, plan.num_steps).run)
        dht = await swarm.start("dht", ["dht", *plan.listen_flags])
        nodes = await launch_nodes(swarm, dht, plan.hands, lambda _: [*plan.listen_flags, *plan.node_flags])
        trainers = [
            await swarm.launch(name, ["train", "--join", dht.contact, "--out", str(folder), *plan.trainer_flags(index)])
            for index, (name, folder) in enumerate(zip(watches, folders, strict=True))
        ]
        yield LocalTraining(dht, nodes, trainers, list(watches.values()))
        await swarm.end_in_order()
        nursery.cancel_scope.cancel()


def network_flags(*, secret_file: Path | None, insecure_loopback: bool) -> list[str]:
    """Flags of every process for the network that a command names.

    Raises:
      UsageError: they contradict each other.
    """
    if insecure_loopback and secret_file is not None:
        raise UsageError("--insecure-loopback proves nothing: --swarm-secret-file would have no effect")
    if secret_file is not None:
        return ["--swarm-secret-file", os.path.abspath(secret_file)]
    return ["--insecure-loopback"] if insecure_loopback else []
