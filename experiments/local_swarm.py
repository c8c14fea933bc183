"""The swarm of local processes, under its former name; see `dmoe_jax.processes`."""

from dmoe_jax.processes import (
    LocalSwarm,
    ProcessFailed,
    SwarmProcess,
    averaging_flags,
    deal_experts,
    last_lines,
    open_local_swarm,
    start_nodes,
    start_trainers,
    trainer_folders,
    wait_for_others,
)

__all__ = [
    "LocalSwarm",
    "ProcessFailed",
    "SwarmProcess",
    "averaging_flags",
    "deal_experts",
    "last_lines",
    "open_local_swarm",
    "start_nodes",
    "start_trainers",
    "trainer_folders",
    "wait_for_others",
]
