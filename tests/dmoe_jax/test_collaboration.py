"""One large batch by many peers, in virtual time: the result is one machine's, whoever joins, leaves or is slow."""

import numpy as np
import trio

from net.transport.sim.events import HostDown
from tests.dmoe_jax.collaborating_peers import Worker, largest_difference, one_machine, start
from tests.net.averaging_swarm import Swarm, in_swarm


def test_five_unequal_peers_equal_one_machine() -> None:
    workers = [Worker(f"peer{n}", seconds) for n, seconds in enumerate((0.1, 0.2, 0.35, 0.5, 1.0))]

    async def body(swarm: Swarm) -> None:
        for worker in workers:
            start(swarm, worker)
        await trio.sleep(60)

    in_swarm(body)
    steps = min(max(worker.log.params, default=0) for worker in workers)
    for worker in workers:
        print(worker.name, len(worker.log.steps), worker.log.peer.totals if worker.log.peer else None)
    print([round(each.samples) for each in workers[0].log.steps], [round(each.averaged_s,2) for each in workers[0].log.steps])
    assert steps >= 10
    expected = one_machine(workers, steps)
    for step in range(1, steps + 1):
        for worker in workers:
            assert largest_difference(worker.log.params[step], expected[step - 1]) < 1e-5
