"""The devices of a command that computes: of its process, or with --distributed of several that compute as one."""

import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import trio
import tyro

from dmoe_jax.cli.lifecycle import Stop
from dmoe_jax.machine.cluster import coordinator_host
from dmoe_jax.machine.xla_threads import set_xla_threads
from dmoe_jax.runs.endings import EXIT_AGAIN, UsageError, mistakes_in_one_line, one_line
from dmoe_jax.runs.setting_up import set_up_jax
from dmoe_jax.runs.speech import say
from dmoe_net.identity import Address

if TYPE_CHECKING:  # they need JAX, which `dmoe --help` does not wait for
    import optax
    from jax.sharding import Mesh

    from dmoe_jax.experts import Expert
    from dmoe_jax.node.sharding import PlacedDevice
    from dmoe_jax.peers.peer import SwarmPeer
    from dmoe_jax.training.engine import Engine

_END_TIMEOUT_S = 10.0
"""Seconds after which this process ends once another one is gone: XLA may wait for that one for ever."""

_REPORT_S = 30.0
"""The same for a process that has a report to write meanwhile."""

_SHUTDOWN_TIMEOUT_S = 10
"""Seconds that processes wait for each other at their end."""

_MOST_XLA_THREADS = 256
"""More than a machine has cores only cost memory: XLA makes them all."""

AUTO = "auto"
"""Value of --distributed with which JAX finds the other processes."""


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Devices of a process, or of several on one host or more that compute as one."""

    devices: str | None = None
    mesh: str | None = None
    xla_threads: int | None = None
    """Threads that XLA computes with on a CPU. Default: as many as there are cores, or as NPROC says. Processes that
    share a machine do better with their share of its cores. Experts that call the host need two, or stop for ever."""
    distributed: Annotated[str | None, tyro.conf.arg(metavar="COORDINATOR:PORT|auto")] = None
    num_processes: int | None = None
    """Number of these processes."""
    process_id: int | None = None
    """Number of this one among them, from 0."""

    def check(self) -> None:
        """Raise `UsageError` for a flag out of range, or if they do not belong together."""
        if self.xla_threads is not None and not 1 <= self.xla_threads <= _MOST_XLA_THREADS:
            raise UsageError(f"--xla-threads must be from 1 to {_MOST_XLA_THREADS}, got {self.xla_threads}")
        numbered = self.num_processes is not None or self.process_id is not None
        if self.distributed in (None, AUTO):
            if numbered:
                why = "without --distributed" if self.distributed is None else "beside --distributed auto"
                raise UsageError(f"--num-processes and --process-id would have no effect {why}")
        elif self.num_processes is None or self.process_id is None:
            raise UsageError("--distributed needs --num-processes and --process-id, unless it is auto")
        elif self.num_processes < 1 or not 0 <= self.process_id < self.num_processes:
            numbers = f"{self.process_id} of {self.num_processes}"
            raise UsageError(f"--process-id must be from 0 to --num-processes less one, got {numbers}")
        else:
            with mistakes_in_one_line("--distributed"):
                Address.parse(self.distributed or "")
        if self.distributed is not None and self.devices is not None:
            raise UsageError("--devices would have no effect beside --distributed, which takes all of all processes")

    async def set_up(self) -> None:
        """Set JAX up before it computes anything; with --distributed it sees the devices of all processes. Raises
        UsageError if the others do not come, the coordinator cannot be reached, or JAX finds no cluster."""
        if self.xla_threads is not None:
            set_xla_threads(self.xla_threads)
        set_up_jax()
        if self.distributed is None:
            return
        import jax

        # It would take SIGTERM for itself, which asks a node to leave in order.
        jax.config.update("jax_enable_preemption_service", False)

        told: dict[str, Any] = {"shutdown_timeout_seconds": _SHUTDOWN_TIMEOUT_S}
        if self.distributed == AUTO:
            say("waits for the other processes of its cluster")
        else:
            told |= {"coordinator_address": self.distributed, "num_processes": self.num_processes}
            told |= {"process_id": self.process_id}
            say(f"process {self.process_id} of {self.num_processes} waits for the others")
        initialize = partial(jax.distributed.initialize, **told)
        try:
            await trio.to_thread.run_sync(initialize, abandon_on_cancel=True)
        except RuntimeError as error:
            raise UsageError(f"--distributed {self.distributed}: {one_line(error)}") from error
        except Exception as error:  # each cluster has its own
            if self.distributed != AUTO:
                raise
            raise UsageError(f"{_NO_CLUSTER} ({one_line(error)})") from error

    @property
    def follows(self) -> bool:
        """True if this process does as process 0 does. JAX is set up by then."""
        return self.distributed is not None and self._number != 0

    @property
    def _number(self) -> int:
        import jax

        return jax.process_index() if self.process_id is None else self.process_id


_NO_CLUSTER = (
    "--distributed auto: JAX finds neither Slurm, Open MPI nor Kubernetes here; outside of them give "
    "--distributed COORDINATOR:PORT, --num-processes and --process-id"
)


@dataclass(frozen=True, kw_only=True)
class NodeDevices(DeviceOptions):
    """Devices that experts live on, of this process or of several on one host or more that make up one node."""

    devices: str | None = None
    """JAX devices of this machine over which the experts are spread, each expert on one: 0-7, 0,2,5 or all. Default:
    the first one."""
    mesh: str | None = None
    """Spread each expert over several devices, such as data=2,model=4: rows of a batch over data, parameters and
    optimiser state over model. With --devices as many meshes as these make up share the experts: 8 devices and model=4
    make two. Default: an expert lives on one device."""
    distributed: Annotated[str | None, tyro.conf.arg(metavar="COORDINATOR:PORT|auto")] = None
    """Make one node of several processes, which hold each expert together on a mesh of all their devices (--mesh;
    default: all along model). Start the same command with the same flags in each of them; process 0 runs on the host
    COORDINATOR, talks to the swarm, and when it leaves the others do, too. The port is for jax.distributed. auto: under
    Slurm, Open MPI and Kubernetes JAX finds out all of this, and the next two."""

    @property
    def _host(self) -> str:
        """Host of process 0."""
        return coordinator_host() if self.distributed == AUTO else Address.parse(self.distributed or "").host

    def check_there(self) -> None:
        """Raise ValueError if there are not so many devices. JAX is initialized by then."""
        from dmoe_jax.machine.device import ThreadDevice
        from dmoe_jax.node.lockstep import mesh_of_all
        from dmoe_jax.node.sharding import node_devices

        if self.distributed is None:
            node_devices(ThreadDevice(), self.devices, self.mesh)
        else:
            mesh_of_all(self.mesh)

    @asynccontextmanager
    async def opened_lead(self, stop: Stop) -> "AsyncIterator[tuple[PlacedDevice, ...] | None]":
        """Lead the other processes while the block lasts, and yield the devices of all; None without the flag."""
        from dmoe_jax.node.lockstep import mesh_of_all, open_lead

        if self.distributed is None:
            yield None
            return
        ask = stop.request_for_another
        # Of a host that JAX found only the name is known by which others reach it, and that may be loopback's here.
        host = None if self.distributed == AUTO else self._host
        async with open_lead(host=host, mesh=mesh_of_all(self.mesh), on_lost=end_soon, on_leave_asked=ask) as placed:
            yield placed

    async def follow(
        self,
        stop: Stop,
        experts: "Mapping[str, Expert]",
        optimizer: "optax.GradientTransformation | None",
        *,
        seed: int,
    ) -> None:
        """Do as process 0 does until it leaves; a wish to stop ends the whole node in order."""
        from dmoe_jax.node.lockstep import follow, mesh_of_all

        async def until_told_to_stop() -> None:
            # Process 0 leaves within the time that a node has, and tells us.
            with stop.body(patience=2):
                await trio.sleep_forever()
            say("asks process 0 to leave")

        say(f"process {self._number} does as process 0 does")
        await follow(
            experts,
            optimizer,
            host=self._host,
            seed=seed,
            mesh=mesh_of_all(self.mesh),
            on_lost=end_soon,
            until_told_to_stop=until_told_to_stop,
        )


@dataclass(frozen=True, kw_only=True)
class TrunkDevices(DeviceOptions):
    """Devices that the trunk lies on, of this process or of several on one host or more that train as one."""

    devices: str | None = None
    """JAX devices of this machine for the trunk: 0-7, 0,2,5 or all. Default: as many as --mesh takes, from the first;
    without it, the first."""
    mesh: str | None = None
    """Spread the trunk over several devices, such as data=2,model=4: rows of a batch over data, parameters and
    optimiser state over model. Default: all of --devices along data. A run may go on with another mesh, or on one
    device: data=1."""
    distributed: Annotated[str | None, tyro.conf.arg(metavar="COORDINATOR:PORT|auto")] = None
    """Make one trainer of several processes, which hold the trunk together on a mesh of all their devices (--mesh;
    default: all along data). Start the same command with the same flags in each of them, with --num-trainers 1. Process
    0 alone has the run folder and speaks; each asks experts for its own rows, and listens for the others at --listen.
    COORDINATOR:PORT is for jax.distributed, on the host of process 0. auto: under Slurm, Open MPI and Kubernetes JAX
    finds out all of this, and the next two."""

    def opened_lead(
        self, engine: "Engine", peer: "SwarmPeer", *, settings: str
    ) -> AbstractAsyncContextManager["Engine"]:
        """As `training.led.opened_lead`."""
        from dmoe_jax.training.led import opened_lead

        return opened_lead(engine, peer, settings=settings, on_lost=partial(end_soon, after_s=_REPORT_S))

    async def follow(self, engine: "Engine", peer: "SwarmPeer", *, settings: str) -> None:
        """As `training.led.follow`."""
        from dmoe_jax.training.led import follow

        await follow(engine, peer, settings=settings, on_lost=partial(end_soon, after_s=_REPORT_S))

    def mesh_of_trunk(self) -> "Mesh | None":
        """The mesh of the trunk; None: JAX's default device. JAX is set up by then. Raises ValueError if the mesh is
        written otherwise, or takes another number of devices than are named, or than there are."""
        import jax

        from dmoe_jax.mesh.layout import Layout, MeshShape, chosen_devices

        shape = None if self.mesh is None else MeshShape.parse(self.mesh)
        if self.distributed is not None:
            devices = tuple(jax.devices())
        elif self.mesh is None and self.devices is None:
            return None
        else:
            devices = chosen_devices(self.devices, shape, jax.local_devices())
        return Layout(devices=devices, mesh_shape=shape or MeshShape(data=len(devices))).mesh


@contextmanager
def failing_at_once() -> Iterator[None]:
    """End a process whose command fails in the block, once it is one of several: JAX would wait at the end for those
    that are gone."""
    try:
        yield
    except SystemExit as failed:
        jax = sys.modules.get("jax")
        if jax is None or not jax.distributed.is_initialized():
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed.code if isinstance(failed.code, int) else 1)


def end_soon(sentence: str, *, after_s: float = _END_TIMEOUT_S) -> None:
    """End this process after so many seconds, with this sentence, unless it has ended by itself."""

    def end() -> None:
        print(f"dmoe: error: {sentence}", file=sys.stderr, flush=True)
        os._exit(EXIT_AGAIN)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()
