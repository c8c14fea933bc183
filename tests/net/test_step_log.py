"""Results of steps reach the peers that follow; donors that give something else, or nothing, are passed over."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
import trio

from dmoe_net.averaging.collaboration.rounds import Averaged
from dmoe_net.averaging.collaboration.step_log import KEEP_S, MAX_KEPT, StepFollower, StepLog
from dmoe_net.identity import Address, Contact
from dmoe_net.rpc.base import Reply, Request, handlers
from dmoe_net.rpc.peer import RpcPeer, open_rpc_peer
from dmoe_net.transport.sim import simulate
from tests.net.sim_hosts import in_simulation, peer

SIZE = 300_000  # two pieces


def brought(number: int) -> Averaged:
    """Averaged result of step `number` of a chain in which every step is named after its number."""
    mean = np.full(SIZE, number, np.float32)
    return Averaged(mean=mean, weight=float(10 * number), notes=0.0, group_id=bytes([number]) * 16)


def keep(log: StepLog, number: int) -> None:
    log.keep(number, chain_after(number - 1), brought(number))


def chain_after(number: int) -> bytes:
    return bytes([number]) * 8


@asynccontextmanager
async def peers(count: int, num_logs: int = 1) -> AsyncIterator[tuple[list[RpcPeer], list[StepLog]]]:
    """So many, all of which can be called; the last one follows, and those before it keep logs of their steps."""
    async with simulate() as network, trio.open_nursery() as nursery, AsyncExitStack() as stack:
        found = []
        for number in range(count):
            name = f"host{number}"
            opened = open_rpc_peer(network.transport(name, peer(name)), peer_id=peer(name), listen=Address(name, 1))
            found.append(await stack.enter_async_context(opened))
        logs = [StepLog(each, prefix="x") for each in found[-1 - num_logs : -1]]
        for log in logs:
            nursery.start_soon(log.run)
        yield found, logs
        nursery.cancel_scope.cancel()


def follower_of(rpc: RpcPeer, donors: Sequence[RpcPeer]) -> StepFollower:
    def contacts() -> list[Contact]:
        return [Contact(each.peer_id, each.address) for each in donors]

    return StepFollower(caller=rpc, prefix="x", size=SIZE, donors=contacts)


@in_simulation
async def test_steps_made_after_the_first_question_come_and_no_others() -> None:
    async with peers(2) as ([donor, own], [log]):
        follower = follower_of(own, [donor])
        await trio.lowlevel.checkpoint()
        keep(log, 1)  # nobody has asked
        await follower.ask()
        assert follower.following(0, chain_after(0)) is None
        keep(log, 2)
        keep(log, 3)
        await follower.ask()
        second = follower.following(1, chain_after(1))
        assert second.weight == 20.0
        np.testing.assert_array_equal(second.mean, brought(2).mean)
        assert follower.following(1, b"another.") is None  # of another chain there is nothing
        assert follower.following(2, chain_after(2)) is not None
        assert follower.following(3, chain_after(3)) is None


@in_simulation
async def test_a_few_are_kept_and_none_when_nobody_asks_any_more() -> None:
    async with peers(2) as ([donor, own], [log]):
        await follower_of(own, [donor]).ask()
        for number in range(1, MAX_KEPT + 3):
            keep(log, number)
        late = follower_of(own, [donor])
        await late.ask()
        assert late.following(1, chain_after(1)) is None
        assert late.following(2, chain_after(2)) is not None
        await trio.sleep(2 * KEEP_S)
        forgotten = follower_of(own, [donor])
        await forgotten.ask()
        assert forgotten.following(2, chain_after(2)) is None


@in_simulation
async def test_whoever_was_asked_before_is_asked_again_for_it_has_kept_what_comes() -> None:
    """Though another is first in the list now, because it was heard of first: nobody had asked that one."""
    async with peers(3, num_logs=2) as ([kept, other, own], logs):
        donors = [kept, other]
        follower = follower_of(own, donors)
        await follower.ask()
        for log in logs:
            keep(log, 1)
        donors.reverse()
        await follower.ask()
        assert follower.following(0, chain_after(0)) is not None
        donors.remove(kept)  # it is gone
        await follower.ask()
        keep(logs[1], 2)
        await follower.ask()
        assert follower.following(1, chain_after(1)) is not None


@pytest.mark.parametrize("fault", ["silent", "short", "not finite", "too many"])
@in_simulation
async def test_who_gives_nothing_of_use_is_passed_over(fault: str) -> None:
    async with peers(3) as ([bad, donor, own], [log]):
        await follower_of(own, [donor]).ask()
        keep(log, 1)

        async def listing(request: Request) -> Reply:
            if fault == "silent":
                await trio.sleep_forever()
            one = [1, chain_after(0), b"g" * 16, 1.0, 0.0]
            return Reply(body={"steps": [one] * (100 if fault == "too many" else 1)})

        async def piece(request: Request) -> Reply:
            length = request.body["length"] - (fault == "short")
            return Reply(tensors=(np.full(length, np.nan if fault == "not finite" else 1, np.float32),))

        follower = follower_of(own, [bad, donor])
        with handlers(bad, {"averaging.x.steps": listing, "averaging.x.steps.piece": piece}):
            await follower.ask()
        assert follower.following(0, chain_after(0)).group_id == brought(1).group_id
