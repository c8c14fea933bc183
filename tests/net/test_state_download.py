"""Newcomers among donors that are dead, slow, greedy or liars."""

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio

from dmoe_net.averaging.state.buffer import pack
from dmoe_net.averaging.state.download import StateUnavailable
from dmoe_net.averaging.state.sharing import SharedState, StateSharingConfig
from dmoe_net.dht.messages import contact_to_wire
from dmoe_net.errors import CallRefused, NetError
from dmoe_net.identity import Address, Contact
from dmoe_net.rpc.base import Handler, Reply, Request
from dmoe_net.transport.sim.events import HostDown
from tests.net.averaging_swarm import Swarm, in_swarm, open_place
from tests.net.test_state_sharing import (
    CONFIG,
    Donor,
    Download,
    assert_same,
    download_at,
    start_donor,
    state_of,
    with_newcomer,
)


def start_liar(swarm: Swarm, offer: Callable[[Any], Awaitable[Reply]], chunk: Handler) -> None:
    """A donor, further than all others, whose answers are what the functions make of them."""

    async def live() -> None:
        async with open_place(swarm, "liar") as place:

            async def open_(request: Request) -> Reply:
                return await offer(place)

            place.rpc.add_handler("averaging.trunk.state.open", open_)
            place.rpc.add_handler("averaging.trunk.state.chunk", chunk)
            assert place.rpc.address is not None
            contact = contact_to_wire(Contact(place.rpc.peer_id, place.rpc.address))
            await place.dht.store("trunk.state", [9, contact], life_s=300)
            await trio.sleep_forever()

    swarm.network.start("liar", live)


async def zeros(request: Request) -> Reply:
    return Reply(tensors=(np.zeros(1000, np.uint8),))


def test_equal_states_are_packed_to_equal_bytes() -> None:
    """The bytes between the arrays are zero, whatever was in that memory before."""
    for _ in range(20):
        dirty = np.full(20_000, 0xAB, np.uint8)
        del dirty
        packed = pack(state_of(3).tensors)
        used = np.zeros(packed.buffer.nbytes, bool)
        start = 0
        for tensor in state_of(3).tensors:
            start += -start % 64
            used[start : start + tensor.nbytes] = True
            start += tensor.nbytes
        assert not np.frombuffer(packed.buffer, np.uint8)[~used].any()
        assert packed.digest == pack(state_of(3).tensors).digest


def test_false_pieces_of_another_do_not_get_an_honest_donor_banned() -> None:
    """The liar offers the honest donor's very state, gives some false pieces of it, and refuses the rest."""

    async def offer(place: Any) -> Reply:
        body = {"min_version": 0, "offered": []}
        return await place.rpc.call(Address("honest", 1), "averaging.trunk.state.open", body, timeout_s=5.0)

    async def some(request: Request) -> Reply:
        if request.body["index"] >= 4:
            raise CallRefused("no more")
        return await zeros(request)

    async def body(swarm: Swarm, download: Download) -> None:
        start_donor(swarm, "honest", Donor(8))
        start_liar(swarm, offer, some)
        await trio.sleep(1.0)
        assert_same(await download(timeout_s=60.0), state_of(8))

    with_newcomer(body)


def test_nothing_is_allocated_for_what_is_not_expected() -> None:
    """16 GiB that somebody announces, within the bounds of the configuration, are refused before there is a buffer."""
    asked: list[int] = []

    async def offer(_: Any) -> Reply:
        body = {"version": 9, "digest": bytes(32), "table": [["uint8", [2**34]]], "facts": {}, "chunk_bytes": 2**20}
        return Reply(body=body, tensors=(np.zeros((2**14, 32), np.uint8),))

    def expects(version: int, table: Any) -> bool:
        asked.append(version)
        return len(table) == len(state_of(8).tensors)

    async def main(swarm: Swarm) -> None:
        start_donor(swarm, "honest", Donor(8))
        start_liar(swarm, offer, zeros)
        await trio.sleep(1.0)
        async with open_place(swarm, "new", client_mode=True) as place:
            download = download_at(place, StateSharingConfig(chunk_bytes=1000))
            assert_same(await download(timeout_s=60.0, expects=expects), state_of(8))
        assert asked == [9, 8]

    in_swarm(main)


def test_a_state_that_is_not_accepted_is_asked_of_others() -> None:
    """The furthest donor's values will not do; it is not asked again."""

    async def body(swarm: Swarm, download: Download) -> None:
        donors = {"bad": Donor(9), "good": Donor(8)}
        for name, donor in donors.items():
            start_donor(swarm, name, donor)
        await trio.sleep(1.0)

        def accepts(state: SharedState) -> bool:
            return state.version == 8

        assert_same(await download(timeout_s=60.0, accepts=accepts), state_of(8))
        assert donors["bad"].taken == 1

    with_newcomer(body)


def test_dead_donors_cost_one_ping_together() -> None:
    """Six that announced themselves and fell silent, all further than the one that lives."""

    async def body(swarm: Swarm, download: Download) -> None:
        start_donor(swarm, "honest", Donor(8))
        for index in range(6):
            start_donor(swarm, f"dead{index}", Donor(9))
        await trio.sleep(1.0)
        for index in range(6):
            swarm.network.apply(HostDown(f"dead{index}", silent=True))
        began = trio.current_time()
        assert_same(await download(timeout_s=60.0), state_of(8))
        assert trio.current_time() - began < 3 * CONFIG.ping_timeout_s

    with_newcomer(body)


def test_a_donor_too_slow_to_end_in_time_is_given_up() -> None:
    """It gives each piece just before the call's timeout, and would end after the time that there is."""

    def slow(handler: Handler) -> Handler:
        async def serve(request: Request) -> Reply:
            await trio.sleep(0.9 * CONFIG.call_timeout_s)
            return await handler(request)

        return serve

    async def body(swarm: Swarm, download: Download) -> None:
        start_donor(swarm, "honest", Donor(8))
        start_donor(swarm, "slow", Donor(9), slow)
        await trio.sleep(1.0)
        assert_same(await download(timeout_s=10.0), state_of(8))

    with_newcomer(body)


def test_nobody_announced_is_not_nobody_who_gives() -> None:
    """None, if there is no donor; an error, if one is announced and gone: somebody may be ahead."""

    async def body(swarm: Swarm, download: Download) -> None:
        assert await download(timeout_s=5.0, attempts=1) is None
        start_donor(swarm, "gone", Donor(8))
        await trio.sleep(1.0)
        swarm.network.apply(HostDown("gone", silent=True))
        with pytest.raises(StateUnavailable, match="1 peers are announced"):
            await download(timeout_s=5.0, attempts=1)
        assert await download(timeout_s=5.0, attempts=1, min_version=9) is None

    with_newcomer(body)


def test_a_donor_does_not_take_snapshots_as_fast_as_it_is_asked() -> None:
    """Whoever asks for the newest version again and again has it busy, and takes nobody's snapshot away."""
    donor = Donor(1)

    async def chatty(swarm: Swarm) -> None:
        async with open_place(swarm, "chatty", client_mode=True) as place:
            while True:
                donor.version += 1
                body = {"min_version": donor.version, "offered": []}
                try:
                    await place.rpc.call(Address("donor", 1), "averaging.trunk.state.open", body, timeout_s=5.0)
                except NetError:
                    await trio.sleep(0.05)

    async def body(swarm: Swarm, download: Download) -> None:
        start_donor(swarm, "donor", donor)
        await trio.sleep(1.0)
        swarm.network.start("chatty", chatty, swarm)
        await trio.sleep(30.0)
        assert donor.taken <= 30.0 / CONFIG.snapshot_period_s + 1
        assert await download(timeout_s=60.0) is not None

    with_newcomer(body)
