"""One large batch by many peers, in virtual time: the result is one machine's, whoever joins, leaves or is slow."""

from collections.abc import Sequence

import pytest
import trio

from net.transport.sim.events import HostDown
from tests.dmoe_jax.collaborating_peers import CONFIG, Worker, check_one_machine, start, until
from tests.net.averaging_swarm import Swarm, in_swarm

SECONDS = (0.1, 0.2, 0.35, 0.5, 1.0)
"""What a micro-batch takes each peer."""


def unequal_workers(seconds: Sequence[float] = SECONDS) -> list[Worker]:
    return [Worker(f"peer{number}", each) for number, each in enumerate(seconds)]


def test_unequal_peers_make_the_steps_of_one_machine() -> None:
    workers = unequal_workers()

    async def body(swarm: Swarm) -> None:
        for worker in workers:
            start(swarm, worker)
        await trio.sleep(40)

    in_swarm(body)
    assert check_one_machine(workers) >= 10
    batches = [each.samples for each in workers[0].log.steps]
    assert all(abs(batch - CONFIG.target_batch_size) <= 0.05 * CONFIG.target_batch_size for batch in batches[1:])


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("victim", [0, 3])
def test_one_joins_and_one_is_killed_while_it_averages(victim: int, silent: bool) -> None:
    workers = unequal_workers()
    took_s = 0.0

    async def body(swarm: Swarm) -> None:
        nonlocal took_s
        for worker in workers[:4]:
            start(swarm, worker)
        await trio.sleep(14)
        start(swarm, workers[4])
        await trio.sleep(10)
        log = workers[victim].log
        await until(lambda: log.peer is not None and log.peer.is_averaging)
        await trio.sleep(0.03)
        swarm.network.apply(HostDown(workers[victim].name, silent=silent))
        before, killed_at = workers[2].log.steps[-1].number, trio.current_time()
        await until(lambda: workers[2].log.steps[-1].number > before)
        took_s = trio.current_time() - killed_at
        await trio.sleep(20)

    in_swarm(body, latency_s=0.05)
    survivors = [worker for worker in workers if worker is not workers[victim]]
    assert check_one_machine(workers, survivors) >= 9
    newcomer = workers[4].log
    assert newcomer.peer is not None
    assert newcomer.peer.totals.states_taken == 1
    assert newcomer.steps[0].number <= 2 + max(step.number for step in workers[2].log.steps if step.number < 9)
    assert took_s < 10
