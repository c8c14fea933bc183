"""The devices of `dmoe train`, over which the trunk is spread."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import tyro

from dmoe_jax.cli.distributed import DeviceOptions, end_soon

if TYPE_CHECKING:  # it needs JAX, which `dmoe --help` does not wait for
    from jax.sharding import Mesh

    from dmoe_jax.peers.peer import SwarmPeer
    from dmoe_jax.training.engine import Engine


_REPORT_S = 30.0
"""Seconds to write a report in, once another process is gone, if XLA does not wait for that one."""
_end_with_a_report = partial(end_soon, after_s=_REPORT_S)


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

    @asynccontextmanager
    async def opened_lead(self, engine: "Engine", peer: "SwarmPeer", *, settings: str) -> "AsyncIterator[Engine]":
        """The engine of a run, which those of the other processes follow while the block lasts. See `training.led`."""
        from dmoe_jax.training.led import opened_lead

        async with opened_lead(engine, peer, settings=settings, on_lost=_end_with_a_report) as lead:
            yield lead

    async def follow(self, engine: "Engine", peer: "SwarmPeer", *, settings: str) -> None:
        """Do as process 0 does with its engine. See `training.led`."""
        from dmoe_jax.training.led import follow

        await follow(engine, peer, settings=settings, on_lost=_end_with_a_report)

    def mesh_of_trunk(self) -> "Mesh | None":
        """The mesh of the trunk; None: JAX's default device. JAX is set up by then.

        Raises:
          ValueError: the mesh is written otherwise, takes another number of devices than are named, or more than there
            are.
        """
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
