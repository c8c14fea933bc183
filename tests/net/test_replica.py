"""Replicas of several processes in averages, in virtual time: what they agree on, what they average, whom they lose."""

from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import trio

from dmoe_net.averaging.averager import Averager, AveragingStep
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from dmoe_net.averaging.opening import open_averager
from dmoe_net.averaging.plan import AveragingPlan
from dmoe_net.averaging.replica import Replica, ReplicaLost, open_replica
from dmoe_net.errors import NetError
from dmoe_net.identity import Contact
from dmoe_net.transport.sim.events import HostDown
from tests.net.averaging_peers import CONFIG
from tests.net.averaging_swarm import Place, Swarm, open_place, swarm_test

SIZES = (40, 25)
"""Numbers in the pieces of a replica's processes."""
GRID = MoshpitGrid(side=2, dims=1)


def piece_of(replica: str, index: int) -> np.ndarray:
    return np.random.default_rng([ord(replica), index]).normal(size=SIZES[index]).astype(np.float32)


def start(
    swarm: Swarm, replica: str, live: Callable[[Replica, Place], Awaitable[None]], count: int = 2, late_s: float = 0.0
) -> None:
    """Start a replica's processes on hosts of their own, the first `late_s` seconds after the others."""
    contacts: dict[int, Contact] = {}
    all_there = trio.Event()

    async def process(index: int) -> None:
        async with open_place(swarm, f"{replica}{index}") as place:
            assert place.rpc.address is not None
            contacts[index] = Contact(place.rpc.peer_id, place.rpc.address)
            if len(contacts) == count:
                all_there.set()
            await all_there.wait()
            if index == 0:
                await trio.sleep(late_s)
            ordered = [contacts[number] for number in range(count)]
            async with open_replica(place.rpc, name="x", contacts=ordered, index=index) as opened:
                await live(opened, place)

    for index in range(count):
        swarm.network.start(f"{replica}{index}", process, index)


def averaging(swarm: Swarm, name: str, steps: int = 1) -> Callable[[Replica, Place], Awaitable[None]]:
    """The life of a process that averages its piece, and leaves the steps in `swarm.done`."""

    async def live(replica: Replica, place: Place) -> None:
        index = replica.index
        plan = AveragingPlan.of(size=SIZES[index], grid=GRID, schema=f"process {index} of 2")
        opened = open_averager(place.rpc, place.dht, plan, prefix="x", rng=place.rng, replica=replica, config=CONFIG)
        async with opened as averager:
            done = [await one_step(averager, piece_of(name, index), number) for number in range(steps)]
            swarm.done[f"{name}{index}"] = done
            await trio.sleep(60.0)

    return live


async def one_step(averager: Averager, vector: np.ndarray, number: int) -> AveragingStep | NetError:
    try:
        return await averager.step(vector, mark=f"round {number}")
    except NetError as error:
        return error


@swarm_test
async def test_processes_agree_on_the_values_of_all(swarm: Swarm) -> None:
    """In their order, each time anew, however late the first one comes; what the first decides all know."""

    async def live(replica: Replica, place: Place) -> None:
        values = [await replica.agree("sum", replica.index * 10 + turn) for turn in range(3)]
        decided = await replica.decided("choice", {"by": replica.index})
        swarm.done[place.name] = values, decided

    start(swarm, "a", live, count=3, late_s=3.0)
    await trio.sleep(20.0)
    expected = [[turn, 10 + turn, 20 + turn] for turn in range(3)], {"by": 0}
    assert swarm.done == {f"a{index}": expected for index in range(3)}


@swarm_test
async def test_each_process_averages_its_piece_with_the_same_of_others(swarm: Swarm) -> None:
    """All processes of both replicas end with the mean of their pieces and hear of the same group and share."""
    for name in "ab":
        start(swarm, name, averaging(swarm, name, steps=2))
    await trio.sleep(40.0)
    for index in range(2):
        mean = (piece_of("a", index) + piece_of("b", index)) / 2
        for name in "ab":
            for done in swarm.done[f"{name}{index}"]:
                np.testing.assert_allclose(done.average, mean, atol=1e-6)
                assert done.received == 1.0
                assert not done.lost
    peers = {tuple(sorted(peer.raw for peer in done.peers)) for steps in swarm.done.values() for done in steps}
    assert len(peers) == 1


@swarm_test
async def test_a_replica_that_loses_a_process_is_lost_and_others_go_on(swarm: Swarm) -> None:
    """Its own processes hear of it; the next group is of those that are whole."""

    async def live(replica: Replica, place: Place) -> None:
        if replica.index == 1:
            await trio.sleep_forever()
        with pytest.raises(ReplicaLost, match="process 1 of this replica is gone"):
            await replica.agree("never")
        swarm.done[place.name] = trio.current_time()

    start(swarm, "c", live)
    for name in "ab":
        start(swarm, name, averaging(swarm, name, steps=1))
    await trio.sleep(5.0)
    swarm.network.apply(HostDown("c1"))
    await trio.sleep(60.0)
    assert swarm.done["c0"] < 60.0
    assert all(done.received == 1.0 for name in ("a0", "a1", "b0", "b1") for done in swarm.done[name])


@swarm_test
async def test_a_replica_alone_keeps_its_pieces(swarm: Swarm) -> None:
    """Nobody is met: every process has its own numbers back, and says so."""
    start(swarm, "a", averaging(swarm, "a"))
    await trio.sleep(60.0)
    for index in range(2):
        (done,) = swarm.done[f"a{index}"]
        assert done.received == 0.0
        assert len(done.peers) == 1
        np.testing.assert_array_equal(done.average, piece_of("a", index))


@swarm_test
async def test_a_stranger_can_neither_agree_nor_stay(swarm: Swarm) -> None:
    """A peer that is no process of the replica is refused; it may only ask who the processes are."""

    async def live(replica: Replica, place: Place) -> None:
        swarm.done.setdefault("contact", replica.contacts[0])
        await trio.sleep_forever()

    start(swarm, "a", live)
    await trio.sleep(5.0)
    contact = swarm.done["contact"]
    async with open_place(swarm, "stranger") as place:
        for method in ("agree", "stay"):
            with pytest.raises(NetError, match="no process of this replica"):
                await place.rpc.call(contact, f"averaging.x.replica.{method}", {"mark": "m#1"}, timeout_s=5.0)
        reply = await place.rpc.call(contact, "averaging.x.replica.processes", {}, timeout_s=5.0)
        assert len(reply.body["contacts"]) == 2


def test_a_replica_has_two_processes_at_least() -> None:
    async def main() -> None:
        async with open_replica(None, name="x", contacts=[], index=0):  # type: ignore[arg-type]
            raise AssertionError

    with pytest.raises(ValueError, match="2 to 1024 processes, got 0"):
        trio.run(main)
