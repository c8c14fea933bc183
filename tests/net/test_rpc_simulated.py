"""Connections, calls and health between peers over minutes and hours, in virtual time on the simulated network; and the
record of who does not answer, without trio, where time is a number."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_net import peer_health
from dmoe_net.errors import CallRefused, ConnectionLost, DialFailed, PeerTimeout
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.peer_health import LATE_LIMIT, Pause, PeerHealth
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.rpc.connection import IDLE_S, LEAVE_S, SILENCE_S
from dmoe_net.rpc.connections import CHECK_PERIOD_S
from dmoe_net.rpc.peer import RpcPeer, open_rpc_peer
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.events import HostDown, HostUp, Partition
from dmoe_net.transport.sim.links import Constant, HostOptions
from dmoe_net.transport.sim.network import SimNetwork
from dmoe_net.wire.messages import CallStart
from dmoe_net.wire.tensors import Tensor
from tests.net.rpc_peers import Stuck, echo, hello, part
from tests.net.sim_hosts import in_simulation

ALICE, BOB, EVE = (PeerId(bytes([letter]) * 32) for letter in b"abe")
MIB = 2**20


@asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[tuple[SimNetwork, RpcPeer, RpcPeer]]:
    """Alice and Bob, both listening, 50 ms apart."""
    async with (
        simulate(latency=Constant(0.05), **options) as network,
        open_peer(network, "a", ALICE) as alice,
        open_peer(network, "b", BOB) as bob,
    ):
        yield network, alice, bob


@asynccontextmanager
async def open_peer(network: SimNetwork, host: str, peer_id: PeerId, **options: Any) -> AsyncIterator[RpcPeer]:
    transport = network.transport(host, peer_id)
    async with open_rpc_peer(transport, peer_id=peer_id, listen=Address(host, 7), **options) as peer:
        peer.add_handler("echo", echo)
        yield peer


def contact(peer: RpcPeer) -> Contact:
    return Contact(peer.peer_id, peer.address)


def frozen(nbytes: int) -> Tensor:
    """A tensor that the simulation need not copy."""
    tensor = np.zeros(nbytes, np.uint8)
    tensor.flags.writeable = False
    return tensor


async def ping(peer: RpcPeer, target: Contact | Address, timeout_s: float = 10.0) -> None:
    await peer.call(target, "rpc.ping", {}, timeout_s=timeout_s)


@in_simulation
async def test_one_connection_serves_both_directions() -> None:
    """A peer that was called calls back on the same connection: by contact, whatever address that names, also a client
    that listens nowhere."""
    async with pair() as (network, alice, bob), open_rpc_peer(network.transport("e", EVE), peer_id=EVE) as eve:
        await ping(alice, Address("b", 7))
        await ping(alice, contact(bob))
        await ping(bob, contact(alice))
        await ping(bob, Contact(ALICE, Address("elsewhere", 1)))
        assert network.statistics().dials == 1
        eve.add_handler("echo", echo)
        await ping(eve, contact(bob))
        reply = await bob.call(Contact(EVE, Address("e", 1)), "echo", {"x": 1}, timeout_s=1.0)
        assert reply.body == {"x": 1}


@in_simulation
async def test_two_that_dial_each_other_at_once_end_with_one_connection() -> None:
    async with pair() as (network, alice, bob):
        for turn in range(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ping, alice, contact(bob))
                nursery.start_soon(ping, bob, contact(alice))
            if turn == 0:
                assert network.statistics().dials == 2
            await trio.sleep(1.0)
        assert network.statistics().links == 1
        assert network.statistics().dials == 2


@in_simulation
async def test_every_end_of_a_call_goes_into_the_peers_health() -> None:
    """Silence is a failure of the service asked, calls that wait together one; any answer clears it."""
    async with pair() as (_, alice, bob):
        stuck, pause, service = Stuck(), Pause(first_s=1.0, longest_s=100.0), (BOB, "stuck")
        bob.add_handler("stuck.wait", stuck)

        async def wait(timeout_s: float) -> None:
            with pytest.raises(PeerTimeout):
                await alice.call(contact(bob), "stuck.wait", {}, timeout_s=timeout_s)

        def blocked_for(seconds: float) -> bool:
            until = trio.current_time() + seconds
            blocks = [alice.health.blocks(service, at, pause) for at in (until - 0.01, until)]
            return blocks == [True, False]

        async with trio.open_nursery() as nursery:
            for timeout_s in (2.0, 2.0, 1.5):
                nursery.start_soon(wait, timeout_s)
        assert blocked_for(0.5)  # from the first end on; the others had begun before it
        await wait(2.0)
        assert blocked_for(2.0)
        with trio.move_on_after(1.0):  # given up by the caller: says nothing
            await alice.call(Address("b", 7), "stuck.wait", {}, timeout_s=60.0)
        assert blocked_for(1.0)
        assert not alice.health.blocks((BOB, "rpc"), trio.current_time(), pause)
        with pytest.raises(CallRefused):
            await alice.call(Address("b", 7), "stuck.unknown", {}, timeout_s=1.0)
        assert not alice.health.blocks(service, trio.current_time(), pause)


@in_simulation
async def test_dials_that_are_not_tried_are_no_failures() -> None:
    """A peer that is gone fails once for each dial; who calls in between is refused, and nothing is counted."""
    async with pair() as (_, alice, _):
        nobody, reasons = Contact(EVE, Address("b", 8)), []
        for _ in range(20):
            with pytest.raises(DialFailed) as caught:
                await ping(alice, nobody)
            reasons.append(str(caught.value))
        assert sum("not tried" in reason for reason in reasons) == 18
        pause = Pause(first_s=100.0, longest_s=1000.0)
        assert "2 times in a row" in alice.health.why_not((EVE, "rpc"), trio.current_time(), pause)


@in_simulation
async def test_calls_of_this_very_peer_need_no_connection() -> None:
    """A trainer and its experts may live in one process; the tensors are copies, as from elsewhere."""
    async with pair() as (network, alice, _):
        tensor = np.ones(3)
        reply = await alice.call(contact(alice), "echo", {}, [tensor], timeout_s=1.0)
        assert np.array_equal(reply.tensors[0], tensor)
        assert not np.shares_memory(reply.tensors[0], tensor)
        alice.add_handler("stuck", Stuck())
        with pytest.raises(PeerTimeout):
            await alice.call(contact(alice), "stuck", {}, timeout_s=1.0)
        assert network.statistics().dials == 0


@in_simulation
async def test_an_idle_connection_is_closed_and_no_call_is_lost_by_that() -> None:
    """Both sides call again in the very seconds in which the connection ends; all calls are answered."""
    async with pair() as (network, alice, bob):
        await ping(alice, contact(bob))
        await trio.sleep(IDLE_S + 2 * CHECK_PERIOD_S)
        assert network.statistics().links == 0
        for turn in range(50):
            await trio.sleep(IDLE_S + CHECK_PERIOD_S * (turn - 5) / 25)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ping, alice, contact(bob))
                nursery.start_soon(ping, bob, contact(alice))
        assert network.statistics().dials > 20


@in_simulation
async def test_a_peer_that_vanishes_is_noticed() -> None:
    """Unplugged in the middle of calls: the caller learns it long before its deadline, the callee stops working."""
    async with pair(give_up_s=1000.0) as (network, alice, bob), trio.open_nursery() as nursery:
        bob.add_handler("stuck", stuck := Stuck())
        noticed_at: list[float] = []

        async def call() -> None:
            with pytest.raises(ConnectionLost, match="silent"):
                await alice.call(contact(bob), "stuck", {}, timeout_s=3600.0)
            noticed_at.append(trio.current_time())

        nursery.start_soon(call)
        await stuck.started.wait()
        unplugged_at = trio.current_time()
        network.apply(Partition(groups=(frozenset({"a"}),)))
        await stuck.cancelled.wait()
        await trio.sleep(CHECK_PERIOD_S)
        assert noticed_at[0] - unplugged_at <= 2 * SILENCE_S + 2 * CHECK_PERIOD_S


@in_simulation
async def test_long_work_of_a_living_peer_is_not_cut_short() -> None:
    async with pair() as (_, alice, bob):

        async def think(_: Request) -> Reply:
            await trio.sleep(20 * SILENCE_S)  # answers to pings are enough
            return Reply(body={"answer": 42})

        bob.add_handler("think", think)
        reply = await alice.call(contact(bob), "think", {}, timeout_s=3600.0)
        assert reply.body == {"answer": 42}


@in_simulation
async def test_a_peer_that_was_started_again_is_reached_at_once() -> None:
    """Its old connection, of which nobody told the other side, is not waited for."""
    async with simulate(latency=Constant(0.05)) as network, open_peer(network, "a", ALICE) as alice:
        starts = 0

        async def program() -> None:
            nonlocal starts
            async with open_peer(network, "b", BOB) as bob:
                starts += 1
                await ping(bob, contact(alice))
                await trio.sleep_forever()

        network.start("b", program)
        await trio.sleep(1.0)
        await ping(alice, Contact(BOB, Address("b", 7)))
        network.apply(HostDown("b", silent=True))
        network.apply(HostUp("b"))
        await trio.sleep(0.5)
        assert starts == 2
        await ping(alice, Contact(BOB, Address("b", 7)), timeout_s=0.2)


@in_simulation
async def test_an_address_that_fails_is_dialled_less_and_less() -> None:
    """600 calls in a minute are about ten dials. A peer that comes there is found within half a minute, or when it
    calls; another address of the same host at once."""
    async with simulate(latency=Constant(0.05)) as network, open_peer(network, "a", ALICE) as alice:
        network.transport("b", BOB)
        dead = Address("b", 7)

        async def call_in_vain(seconds: int) -> None:
            for _ in range(10 * seconds):
                with pytest.raises(DialFailed, match="refused"):
                    await ping(alice, dead)
                await trio.sleep(0.1)

        await call_in_vain(60)
        assert 6 <= network.statistics().dials <= 12
        transport = network.transport("b", EVE)
        async with open_rpc_peer(transport, peer_id=EVE, listen=Address("b", 9)) as eve:
            await ping(alice, contact(eve))
        async with open_peer(network, "b", BOB):
            found_after = trio.current_time() + 30.0
            while trio.current_time() < found_after:
                try:
                    await ping(alice, dead)
                    break
                except DialFailed:
                    await trio.sleep(0.1)
            await ping(alice, dead)
        await trio.sleep(1.0)
        await call_in_vain(60)
        async with open_peer(network, "b", BOB) as bob:
            await ping(bob, contact(alice))
            await ping(alice, dead)


@in_simulation
async def test_a_small_call_overtakes_a_large_one() -> None:
    """16 MiB take 1.7 s on a line of 80 Mbit/s; a call placed meanwhile takes a fraction of that."""
    async with pair(hosts=HostOptions(up_bps=80e6)) as (_, alice, bob), trio.open_nursery() as nursery:
        await ping(alice, contact(bob))
        ended: dict[str, float] = {}

        async def call(name: str, tensor: np.ndarray) -> None:
            await alice.call(contact(bob), "echo", {}, [tensor], timeout_s=60.0)
            ended[name] = trio.current_time() - started

        started = trio.current_time()
        nursery.start_soon(call, "large", np.zeros(16 * MIB, np.uint8))
        await trio.sleep(0.3)
        asked = trio.current_time() - started
        await call("small", np.zeros(100, np.uint8))
        assert ended["small"] - asked < 0.3
        assert "large" not in ended


@in_simulation
async def test_a_large_call_that_is_given_up_is_not_sent_to_the_end() -> None:
    """Its handler never runs, the line is free for the next call, and the connection stays."""
    async with pair(hosts=HostOptions(up_bps=80e6)) as (network, alice, bob):
        with pytest.raises(PeerTimeout):
            await alice.call(contact(bob), "echo", {}, [np.zeros(16 * MIB, np.uint8)], timeout_s=0.5)
        await ping(alice, contact(bob), timeout_s=0.3)
        assert network.statistics("b").nbytes < 6 * MIB
        assert network.statistics().dials == 1


@in_simulation
async def test_a_peer_that_does_not_read_blocks_only_itself() -> None:
    """It asks for 1000 MiB and reads nothing: others are served, and it is turned away when enough waits for it."""
    async with pair() as (network, alice, bob):
        num_made = 0

        async def give(_: Request) -> Reply:
            nonlocal num_made
            num_made += 1
            return Reply(tensors=(np.zeros(1 * MIB, np.uint8),))

        bob.add_handler("give", give)
        link = await network.transport("e", EVE).dial(Address("b", 7))
        await link.send(hello(EVE))
        for call_id in range(1, 1001):
            await link.send(part(CallStart(call_id=call_id, method="give", timeout_s=1000.0, body={})))
            if call_id % 20 == 0:
                await ping(alice, contact(bob), timeout_s=0.5)
        assert 64 <= num_made <= 64 + 64 + 8  # what may be under way, what may wait
        link.abort()


@in_simulation
async def test_a_parting_that_never_ends_is_ended() -> None:
    async with pair() as (network, _, bob):
        link = await network.transport("e", EVE).dial(Address("b", 7))
        await link.send(hello(EVE))
        started = trio.current_time()
        while await link.receive() is not None:
            pass
        assert trio.current_time() - started <= IDLE_S + LEAVE_S + 3 * CHECK_PERIOD_S
        await ping(bob, contact(bob))


@in_simulation
async def test_the_window_never_runs_dry() -> None:
    """Many times the window in each direction, two calls at a time: the shares that are used come back."""
    async with pair() as (_, alice, bob), trio.open_nursery() as nursery:

        async def calls() -> None:
            for _ in range(15):
                await alice.call(contact(bob), "echo", {}, [frozen(8 * MIB)], timeout_s=60.0)

        nursery.start_soon(calls)
        nursery.start_soon(calls)


def num_tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


@in_simulation
async def test_a_connection_without_calls_runs_no_task_and_serves_the_next_ones() -> None:
    """Connections that wait, most of a large simulation, take memory, but no tasks. To wake up costs tasks, once for
    calls in quick succession."""
    async with pair() as (_, alice, bob):
        tasks = num_tasks()
        for _ in range(3):
            await ping(alice, contact(bob))
        assert num_tasks() == tasks + 4  # a reader and a writer at each end
        for caller, called in ((alice, bob), (alice, bob), (bob, alice), (alice, bob)):
            await ping(caller, contact(called))
            await trio.sleep(2 * CHECK_PERIOD_S)
            assert num_tasks() == tasks
        assert alice.statistics().outgoing == 1


@in_simulation
async def test_who_vanished_while_the_connection_rested_is_given_up_by_the_next_call() -> None:
    async with simulate(latency=Constant(0.05)) as network, open_peer(network, "a", ALICE) as alice:

        async def program() -> None:
            async with open_peer(network, "b", BOB):
                await trio.sleep_forever()

        network.start("b", program)
        bob = Contact(BOB, Address("b", 7))
        await trio.sleep(1.0)
        await ping(alice, bob)
        await trio.sleep(2 * CHECK_PERIOD_S)
        network.apply(HostDown("b", silent=True))
        with pytest.raises(ConnectionLost):
            await ping(alice, bob, timeout_s=3 * SILENCE_S)
        await trio.sleep(2.0)
        assert alice.statistics().outgoing == 0


@in_simulation
async def test_a_peer_that_is_closed_parts_from_connections_that_rest() -> None:
    async with pair() as (network, alice, _):
        async with open_peer(network, "e", EVE) as eve:
            await ping(alice, contact(eve))
            await trio.sleep(2 * CHECK_PERIOD_S)
        await trio.sleep(1.0)
        assert alice.statistics().outgoing == 0


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from((0.0, 0.05, 0.1, 0.15, 0.9, 1.1, 4.0, 35.0))), max_size=12))
def test_calls_at_any_moment_find_their_answer(calls: list[tuple[bool, float]]) -> None:
    """Also those that arrive, or are placed, in the instant in which either end goes to rest or parts."""

    async def place() -> None:
        async with pair() as (_, alice, bob), trio.open_nursery() as nursery:
            for is_alice, gap_s in calls:
                caller, called = (alice, bob) if is_alice else (bob, alice)
                nursery.start_soon(ping, caller, contact(called), 1.0)
                await trio.sleep(gap_s)

    run(place)


PAUSE = Pause(first_s=5.0, longest_s=60.0)


def test_the_pause_doubles_up_to_its_longest() -> None:
    """5, 10, 20, 40, then 60 s; with one failure forgiven the same one later; an answer clears all."""
    health, lenient = PeerHealth(), Pause(first_s=5.0, longest_s=60.0, forgiven=1)
    now = 1.0
    for pause_s, after_one in ((5.0, 0.0), (10.0, 5.0), (20.0, 10.0), (40.0, 20.0), (60.0, 40.0), (60.0, 60.0)):
        health.failed("peer", now)
        assert health.blocks("peer", now + pause_s - 0.01, PAUSE)
        assert not health.blocks("peer", now + pause_s, PAUSE)
        assert health.blocks("peer", now + max(0.0, after_one - 0.01), lenient) == (after_one > 0)
        assert not health.blocks("peer", now + after_one, lenient)
        now += pause_s
    health.succeeded("peer")
    assert not health.blocks("peer", now, PAUSE)
    assert Pause(first_s=5.0, longest_s=60.0).after(10_000) == 60.0
    assert Pause(first_s=0.0, longest_s=0.0).after(3) == 0.0


def test_the_reason_of_the_last_failure_is_told() -> None:
    """With how often and for how long; nothing is told of who may be tried."""
    health = PeerHealth()
    assert health.why_not("peer", 0.0, PAUSE) is None
    health.failed("peer", 1.0, "refused")
    health.failed("peer", 2.0, "silent")
    assert health.why_not("peer", 4.5, PAUSE) == "silent (2 times in a row; not tried for 7.5 s)"
    assert health.why_not("other", 4.5, PAUSE) is None


def test_what_fails_together_fails_once() -> None:
    """Failures within `together_s` of the last that counted are one with it; the next one counts."""
    health = PeerHealth()
    for now in (10.0, 11.0, 12.9):
        health.failed("peer", now, together_s=3.0)
    assert not health.blocks("peer", 15.0, PAUSE)
    health.failed("peer", 13.0, together_s=3.0)
    assert health.blocks("peer", 22.9, PAUSE)


def test_late_answers_in_a_row_are_a_failure() -> None:
    """The third is; an answer in between starts the count anew."""
    health = PeerHealth()
    for _ in range(LATE_LIMIT - 1):
        health.late("expert", 1.0)
    health.succeeded("expert")
    for _ in range(LATE_LIMIT - 1):
        health.late("expert", 1.0)
    assert not health.blocks("expert", 1.0, PAUSE)
    health.late("expert", 1.0)
    assert health.blocks("expert", 5.9, PAUSE)
    assert "late 3 times" in str(health.why_not("expert", 1.0, PAUSE))


def test_the_record_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its size the target that failed longest ago is forgotten."""
    monkeypatch.setattr(peer_health, "MAX_TARGETS", 2)
    health = PeerHealth()
    for number in (1, 2, 1, 3):
        health.failed(number, float(number))
    assert health.blocked(3.0, PAUSE) == (1, 3)


def test_impossible_pauses_are_refused() -> None:
    for first_s, longest_s, forgiven in ((-1.0, 1.0, 0), (2.0, 1.0, 0), (1.0, 1.0, -1)):
        with pytest.raises(ValueError, match="expected 0 <= first_s"):
            Pause(first_s=first_s, longest_s=longest_s, forgiven=forgiven)
