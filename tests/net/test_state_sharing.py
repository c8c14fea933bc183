"""Whole states from peer to peer: packing, the freshest donor, broken downloads, several donors of one state at once;
donors that are dead, slow, greedy or liars."""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import trio

from dmoe_net.averaging.state.buffer import StateBuffer, check_table_untrusted, pack, piece_hash, receive_untrusted
from dmoe_net.averaging.state.download import StateUnavailable, download_state
from dmoe_net.averaging.state.sharing import SharedState, StateSharing, StateSharingConfig, StateSource
from dmoe_net.dht.messages import contact_to_wire
from dmoe_net.errors import CallRefused, NetError, RemoteProtocolError
from dmoe_net.identity import Address, Contact
from dmoe_net.rpc.base import Caller, Handler, Reply, Request
from dmoe_net.transport.sim.events import HostDown
from tests.net.averaging_swarm import Place, Swarm, in_swarm, open_place

CONFIG = StateSharingConfig(chunk_bytes=1000, call_timeout_s=5.0)
OPEN, CHUNK = "averaging.trunk.state.open", "averaging.trunk.state.chunk"


def state_of(version: int) -> SharedState:
    """A state of 10 kB with arrays of several kinds."""
    rng = np.random.default_rng(version)
    tensors = (
        rng.normal(size=(40, 50)).astype(np.float32),
        np.array(version, np.int64),
        np.zeros((0, 3), np.float32),
        rng.normal(size=7).astype(ml_dtypes.bfloat16),
        np.array([True, False]),
    )
    return SharedState(version=version, tensors=tensors, facts={"name": "trunk", "step": version})


def assert_same(found: SharedState | None, expected: SharedState) -> None:
    """Bit for bit."""
    assert (found.version, found.facts) == (expected.version, expected.facts)
    for ours, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(ours, theirs)


Tamper = Callable[[Handler, Request], Awaitable[Reply]]
"""Answers a request for a piece, perhaps by means of the true handler."""


async def honestly(serve: Handler, request: Request) -> Reply:
    return await serve(request)


class Tampered:
    """A caller whose answers to requests for pieces are what `tamper` makes of them."""

    def __init__(self, caller: Caller, tamper: Tamper) -> None:
        self._caller = caller
        self._tamper = tamper

    def add_handler(self, method: str, handler: Handler, *, max_concurrent: int = 64) -> None:
        handler = functools.partial(self._tamper, handler) if method == CHUNK else handler
        self._caller.add_handler(method, handler, max_concurrent=max_concurrent)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._caller, name)


class Donor:
    """A peer with a state; `taken` counts its snapshots."""

    def __init__(self, version: int, tamper: Tamper = honestly) -> None:
        self.version = version
        self.tamper = tamper
        self.taken = 0

    async def snapshot(self) -> SharedState:
        self.taken += 1
        return state_of(self.version)

    async def live(self, swarm: Swarm, name: str) -> None:
        """Announce itself and serve."""
        source = StateSource(lambda: self.version, self.snapshot)
        async with open_place(swarm, name) as place:
            caller = Tampered(place.rpc, self.tamper)
            await StateSharing(caller, place.dht, prefix="trunk", source=source, config=CONFIG).run()


class Liar:
    """A donor, further than all others, whose answers are what the functions make of them."""

    def __init__(self, offer: Callable[[Place], Awaitable[Reply]], chunk: Handler) -> None:
        self.offer = offer
        self.chunk = chunk

    async def live(self, swarm: Swarm, name: str) -> None:
        """Announce itself and serve."""
        async with open_place(swarm, name) as place:

            async def offer(request: Request) -> Reply:
                return await self.offer(place)

            place.rpc.add_handler(OPEN, offer)
            place.rpc.add_handler(CHUNK, self.chunk)
            contact = contact_to_wire(Contact(place.rpc.peer_id, place.rpc.address))
            await place.dht.store("trunk.state", [9, contact], life_s=300)
            await trio.sleep_forever()


async def start(swarm: Swarm, **donors: Donor | Liar) -> None:
    """Let donors live on hosts of these names until the network ends or they go down; wait until they are announced."""
    for name, donor in donors.items():
        swarm.network.start(name, donor.live, swarm, name)
    await trio.sleep(1.0)


Download = Callable[..., Awaitable[SharedState | None]]


def newcomer_test(body: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A synchronous test out of an async one whose first arguments are the swarm and a client's `download_state`."""

    @functools.wraps(body)
    def test(**parameters: Any) -> None:
        async def main(swarm: Swarm) -> None:
            async with open_place(swarm, "new", client_mode=True) as place:
                options = {"prefix": "trunk", "rng": place.rng, "config": CONFIG}
                await body(swarm, functools.partial(download_state, place.rpc, place.dht, **options), **parameters)

        in_swarm(main)

    _, _, *others = inspect.signature(body).parameters.values()
    test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
    return test


def test_packing_and_views() -> None:
    """The buffer gives back what went in, in pieces too, and its digest is that of the content."""
    state = state_of(3)
    packed = pack(state.tensors)
    pieces = b"".join(packed.chunk(index, 1000).tobytes() for index in range(20))
    received = receive_untrusted(packed.table, memoryview(bytearray(pieces)), packed.digest)
    assert_same(SharedState(version=3, tensors=received, facts=state.facts), state)
    assert check_table_untrusted(packed.table, max_bytes=10**6) == packed.buffer.nbytes == len(pieces)
    assert pack(state_of(4).tensors).digest != packed.digest
    assert pack([np.zeros(4, np.float32)]).digest != pack([np.zeros((2, 2), np.float32)]).digest


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


@pytest.mark.parametrize("position", [0, 5000, -1])
def test_one_wrong_bit_is_noticed(position: int) -> None:
    packed = pack(state_of(3).tensors)
    damaged = bytearray(packed.buffer)
    damaged[position] ^= 1
    with pytest.raises(RemoteProtocolError, match="digest"):
        receive_untrusted(packed.table, memoryview(damaged), packed.digest)


@pytest.mark.parametrize(
    "table",
    [None, {}, [["float32"]], [["object", [1]]], [["float32", [-1]]], [["float32", [True]]], [[["float32"], [1]]],
     [["float32", [2**39, 2**39]]], [["int8", []]] * 5000, [["int8", [1] * 99]]],
)  # fmt: skip
def test_a_wrong_table_is_refused(table: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        check_table_untrusted(table, max_bytes=10**9)


@newcomer_test
async def test_the_freshest_donor_is_asked(swarm: Swarm, download: Download) -> None:
    """The donor that is furthest, of three, gives its state; the others are not disturbed."""
    donors = [Donor(version) for version in (5, 9, 7)]
    await start(swarm, **{f"donor{number}": donor for number, donor in enumerate(donors)})
    assert_same(await download(timeout_s=20.0), state_of(9))
    assert [donor.taken for donor in donors] == [0, 1, 0]


@newcomer_test
async def test_one_snapshot_serves_many(swarm: Swarm, download: Download) -> None:
    """Ten newcomers at once cost a donor one snapshot; one that comes when it is far ahead gets a new one."""
    donor, found = Donor(5), []
    await start(swarm, donor=donor)

    async def join() -> None:
        found.append(await download(timeout_s=20.0))

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(join)
    assert donor.taken == 1
    for state in found:
        assert_same(state, state_of(5))
    donor.version = 5 + CONFIG.max_lag + 1
    assert_same(await download(timeout_s=20.0), state_of(donor.version))


@newcomer_test
async def test_a_broken_download_goes_on_where_it_was(swarm: Swarm, download: Download) -> None:
    """The donor refuses after four pieces, once; the newcomer comes back and fetches only the others."""
    served: list[int] = []

    async def once_broken(serve: Handler, request: Request) -> Reply:
        served.append(request.body["index"])
        if len(served) == 5:
            raise OSError("the disk is full")
        return await serve(request)

    donor = Donor(4, once_broken)
    await start(swarm, donor=donor)
    assert_same(await download(timeout_s=30.0), state_of(4))
    assert donor.taken == 1
    assert len(set(served)) == 9
    assert len(served) < 9 + 5


@newcomer_test
async def test_nothing_to_be_had_ends_in_time(swarm: Swarm, download: Download) -> None:
    """Nobody has a state, or none that is late enough: None, when the time is up."""
    began = trio.current_time()
    assert await download(timeout_s=3.0) is None
    await start(swarm, donor=Donor(5))
    assert await download(min_version=6, timeout_s=3.0) is None
    assert trio.current_time() - began <= 7.0 + 1e-6


async def zeros(request: Request) -> Reply:
    return Reply(tensors=(np.zeros(1000, np.uint8),))


@newcomer_test
async def test_false_pieces_of_another_do_not_get_an_honest_donor_banned(swarm: Swarm, download: Download) -> None:
    """The liar offers the honest donor's very state, gives some false pieces of it, and refuses the rest."""

    async def offer(place: Place) -> Reply:
        return await place.rpc.call(Address("honest", 1), OPEN, {"min_version": 0, "offered": []}, timeout_s=5.0)

    async def some(request: Request) -> Reply:
        if request.body["index"] >= 4:
            raise CallRefused("no more")
        return await zeros(request)

    await start(swarm, honest=Donor(8), liar=Liar(offer, some))
    assert_same(await download(timeout_s=60.0), state_of(8))


@newcomer_test
async def test_nothing_is_allocated_for_what_is_not_expected(swarm: Swarm, download: Download) -> None:
    """16 GiB that somebody announces, within the bounds of the configuration, are refused before there is a buffer."""
    asked: list[int] = []

    async def offer(_: Place) -> Reply:
        body = {"version": 9, "digest": bytes(32), "table": [["uint8", [2**34]]], "facts": {}, "chunk_bytes": 2**20}
        return Reply(body=body, tensors=(np.zeros((2**14, 32), np.uint8),))

    def expects(version: int, table: Any) -> bool:
        asked.append(version)
        return len(table) == len(state_of(8).tensors)

    await start(swarm, honest=Donor(8), liar=Liar(offer, zeros))
    assert_same(await download(timeout_s=60.0, expects=expects), state_of(8))
    assert asked == [9, 8]


@newcomer_test
async def test_a_state_that_is_not_accepted_is_asked_of_others(swarm: Swarm, download: Download) -> None:
    """The furthest donor's values will not do; it is not asked again."""
    bad = Donor(9)
    await start(swarm, bad=bad, good=Donor(8))
    assert_same(await download(timeout_s=60.0, accepts=lambda state: state.version == 8), state_of(8))
    assert bad.taken == 1


@newcomer_test
async def test_dead_donors_cost_one_ping_together(swarm: Swarm, download: Download) -> None:
    """Six that announced themselves and fell silent, all further than the one that lives."""
    dead = [f"dead{index}" for index in range(6)]
    await start(swarm, honest=Donor(8), **{name: Donor(9) for name in dead})
    for name in dead:
        swarm.network.apply(HostDown(name, silent=True))
    began = trio.current_time()
    assert_same(await download(timeout_s=60.0), state_of(8))
    assert trio.current_time() - began < 3 * CONFIG.ping_timeout_s


@newcomer_test
async def test_a_donor_too_slow_to_end_in_time_is_given_up(swarm: Swarm, download: Download) -> None:
    """It gives each piece just before the call's timeout, and would end after the time that there is."""

    async def slow(serve: Handler, request: Request) -> Reply:
        await trio.sleep(0.9 * CONFIG.call_timeout_s)
        return await serve(request)

    await start(swarm, honest=Donor(8), slow=Donor(9, slow))
    assert_same(await download(timeout_s=10.0), state_of(8))


@newcomer_test
async def test_nobody_announced_is_not_nobody_who_gives(swarm: Swarm, download: Download) -> None:
    """None, if there is no donor; an error, if one is announced and gone: somebody may be ahead."""
    assert await download(timeout_s=5.0, attempts=1) is None
    await start(swarm, gone=Donor(8))
    swarm.network.apply(HostDown("gone", silent=True))
    with pytest.raises(StateUnavailable, match="1 peers are announced"):
        await download(timeout_s=5.0, attempts=1)
    assert await download(timeout_s=5.0, attempts=1, min_version=9) is None


@newcomer_test
async def test_a_donor_does_not_take_snapshots_as_fast_as_it_is_asked(swarm: Swarm, download: Download) -> None:
    """Whoever asks for the newest version again and again has it busy, and takes nobody's snapshot away."""
    donor = Donor(1)

    async def chatty() -> None:
        async with open_place(swarm, "chatty", client_mode=True) as place:
            while True:
                donor.version += 1
                body = {"min_version": donor.version, "offered": []}
                try:
                    await place.rpc.call(Address("donor", 1), OPEN, body, timeout_s=5.0)
                except NetError:
                    await trio.sleep(0.05)

    await start(swarm, donor=donor)
    swarm.network.start("chatty", chatty)
    await trio.sleep(30.0)
    assert donor.taken <= 30.0 / CONFIG.snapshot_period_s + 1
    assert await download(timeout_s=60.0) is not None


@newcomer_test
async def test_several_donors_give_one_state_together(swarm: Swarm, download: Download) -> None:
    """Three that have the very same: each gives some pieces, and takes one snapshot."""
    served = dict.fromkeys(("donor0", "donor1", "donor2"), 0)

    async def count(name: str, serve: Handler, request: Request) -> Reply:
        served[name] += 1
        await trio.sleep(0.2)  # or the first would have given all before the second is asked
        return await serve(request)

    donors = {name: Donor(8, functools.partial(count, name)) for name in served}
    await start(swarm, **donors)
    assert_same(await download(timeout_s=20.0), state_of(8))
    assert min(served.values()) > 0
    assert sum(served.values()) == 9  # of 8.4 kB in pieces of 1000 bytes, each once
    assert [donor.taken for donor in donors.values()] == [1, 1, 1]


@pytest.mark.parametrize("fault", ["lies", "refuses", "falls silent"])
@newcomer_test
async def test_one_bad_donor_of_three_costs_its_pieces(swarm: Swarm, download: Download, fault: str) -> None:
    """Nothing is fetched anew but the pieces that were asked of it; a silent one is not waited for."""
    good: list[int] = []

    async def bad(serve: Handler, request: Request) -> Reply:
        if fault == "falls silent":
            await trio.sleep_forever()
        if fault == "refuses":
            raise CallRefused("not today")
        (piece,) = (await serve(request)).tensors
        return Reply(tensors=(np.zeros_like(piece),))

    async def honest(serve: Handler, request: Request) -> Reply:
        good.append(request.body["index"])
        await trio.sleep(0.2)
        return await serve(request)

    await start(swarm, bad=Donor(8, bad), good0=Donor(8, honest), good1=Donor(8, honest))
    began = trio.current_time()
    assert_same(await download(timeout_s=60.0), state_of(8))
    assert trio.current_time() - began < CONFIG.call_timeout_s
    assert sorted(good) == list(range(9))


def offer_of(state: StateBuffer) -> dict[str, Any]:
    """Offer of a state, as a donor of version 8 makes it."""
    return {"version": 8, "digest": state.digest, "table": state.table, "facts": {}, "chunk_bytes": 1000}


@newcomer_test
async def test_hashes_that_are_a_lie_ban_those_who_vouch_for_them_and_nobody_else(
    swarm: Swarm, download: Download
) -> None:
    """The liar's own pieces have its hashes, but the whole does not have the digest; the honest donor of that very
    digest is asked next."""
    packed = pack(state_of(8).tensors)
    false = [np.zeros_like(packed.chunk(index, 1000)) for index in range(9)]
    hashes = np.frombuffer(b"".join(map(piece_hash, false)), np.uint8).reshape(-1, 32)

    async def piece(request: Request) -> Reply:
        return Reply(tensors=(false[request.body["index"]],))

    async def offer(_: Place) -> Reply:
        return Reply(body=offer_of(packed), tensors=(hashes,))

    honest = Donor(8)
    await start(swarm, honest=honest, liar=Liar(offer, piece))
    assert_same(await download(timeout_s=60.0), state_of(8))
    assert honest.taken == 1


@newcomer_test
async def test_an_offer_without_sound_hashes_is_none(swarm: Swarm, download: Download) -> None:
    """None, too few, or of another kind: that donor is not asked again, and gives no piece."""
    packed, asked = pack(state_of(8).tensors), list[int]()
    wrong: list[tuple[Any, ...]] = [(), (np.zeros((8, 32), np.uint8),), (np.zeros((9, 32), np.float32),)]
    offers = iter(wrong)

    async def piece(request: Request) -> Reply:
        asked.append(request.body["index"])
        return Reply(tensors=(packed.chunk(request.body["index"], 1000),))

    async def offer(_: Place) -> Reply:
        return Reply(body=offer_of(packed), tensors=next(offers))

    await start(swarm, liar=Liar(offer, piece))
    for _ in wrong:
        with pytest.raises(StateUnavailable):
            await download(timeout_s=5.0, attempts=3)
    assert not asked
    assert next(offers, None) is None


@pytest.mark.parametrize("changes", [{"max_donors": 0}, {"chunk_bytes": 2**24 + 1}, {"window": 0}])
def test_state_configs_that_cannot_be(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        StateSharingConfig(**changes)
