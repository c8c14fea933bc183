"""Baselines of the collaboration: one machine, synchronous all-reduce, and a parameter server.

The loss of all three is that of one machine, really trained with batches of exactly the target: averaging gradients of
parts of a batch makes the same steps. Their time axes are computed from the time of a step,

    one machine          target / its speed
    all-reduce           target / n * seconds a sample of the slowest       + an all-reduce with equal shares
    parameter server     target / speed of all together                     + the same, all of it reduced by one member

where the all-reduce is the real one on the simulated network with the collaboration's lines, of a single step. This
flatters the baselines: nobody dies or joins, no group has to be found, and with the parameter server nobody waits for
slower peers.
"""

from collections.abc import Mapping, Sequence
from itertools import islice

from dmoe_net.averaging.grouping.group import Role
from experiments.collaborative.albert_swarm import Curve, Point, all_reduce_config
from experiments.collaborative.albert_task import AlbertTask
from experiments.collaborative.scenes import LATENCY_S
from experiments.collaborative.shares import Members, simulated_seconds
from experiments.collaborative.world import PeerSpec


def one_machine_losses(task: AlbertTask, *, steps: int) -> dict[int, float]:
    """Step -> held-out loss after it, of one machine with the whole batch."""
    return {step: task.loss(params) for step, params in enumerate(islice(task.one_machine(), steps), 1)}


def curve_with(losses: Mapping[int, float], *, step_s: float, target: int) -> Curve:
    """These losses, after steps of so many virtual seconds and samples each."""
    return Curve(
        points=tuple(
            Point(step=step, virtual_s=step * step_s, samples=float(step * target), loss=loss)
            for step, loss in losses.items()
        )
    )


def one_machine_step_s(specs: Sequence[PeerSpec], *, target: int) -> float:
    """Seconds of a step of the fastest machine alone."""
    return target * min(spec.sample_s for spec in specs)


def all_reduce_step_s(specs: Sequence[PeerSpec], *, target: int, num_params: int) -> float:
    """Seconds of a step with equal batches: until the slowest has its own, and the average is everywhere."""
    slowest_s = target / len(specs) * max(spec.sample_s for spec in specs)
    return slowest_s + _averaging_s(specs, [Role.NODE] * len(specs), num_params)


def parameter_server_step_s(specs: Sequence[PeerSpec], *, target: int, num_params: int) -> float:
    """Seconds of a step whose gradients all go to one peer, with the widest line, and come back from there."""
    server = max(range(len(specs)), key=lambda index: specs[index].line.down_bps)
    roles = [Role.NODE if index == server else Role.CLIENT for index in range(len(specs))]
    all_per_s = sum(1 / spec.sample_s for spec in specs)
    return target / all_per_s + _averaging_s(specs, roles, num_params)


def _averaging_s(specs: Sequence[PeerSpec], roles: Sequence[Role], num_params: int) -> float:
    members = Members(roles=tuple(roles), speeds=tuple(spec.speeds for spec in specs))
    size = num_params + 1  # the number of samples travels with a gradient
    config = all_reduce_config(num_params)
    return simulated_seconds(members, size=size, knows_speeds=False, latency_s=LATENCY_S, config=config)
