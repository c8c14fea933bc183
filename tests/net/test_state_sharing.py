"""Whole states from peer to peer: packing, the freshest donor, broken downloads."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import trio

from dmoe_net.averaging.state.buffer import check_table_untrusted, pack, receive_untrusted
from dmoe_net.averaging.state.download import download_state
from dmoe_net.averaging.state.sharing import SharedState, StateSharing, StateSharingConfig, StateSource
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.rpc.base import Caller, Handler, Reply, Request
from tests.net.averaging_swarm import Place, Swarm, in_swarm, open_place

CONFIG = StateSharingConfig(chunk_bytes=1000, call_timeout_s=5.0)


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
    assert found is not None
    assert (found.version, found.facts) == (expected.version, expected.facts)
    for ours, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        np.testing.assert_array_equal(ours, theirs)


class Donor:
    """A peer with a state; `taken` counts its snapshots."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.taken = 0

    async def snapshot(self) -> SharedState:
        self.taken += 1
        return state_of(self.version)

    def sharing(self, place: Place, wrap: Callable[[Handler], Handler] = lambda handler: handler) -> StateSharing:
        source, caller = StateSource(lambda: self.version, self.snapshot), Tampered(place.rpc, wrap)
        return StateSharing(caller, place.dht, prefix="trunk", source=source, config=CONFIG)


class Tampered:
    """A caller whose handlers of piece requests are replaced by what `wrap` makes of them."""

    def __init__(self, caller: Caller, wrap: Callable[[Handler], Handler]) -> None:
        self._caller = caller
        self._wrap = wrap

    def add_handler(self, method: str, handler: Handler, *, max_concurrent: int = 64) -> None:
        tampered = self._wrap(handler) if method.endswith("chunk") else handler
        self._caller.add_handler(method, tampered, max_concurrent=max_concurrent)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._caller, name)


def start_donor(
    swarm: Swarm, name: str, donor: Donor, wrap: Callable[[Handler], Handler] = lambda handler: handler
) -> None:
    """Let it announce itself and serve, until the network ends or its host goes down."""

    async def live() -> None:
        async with open_place(swarm, name) as place:
            await donor.sharing(place, wrap).run()

    swarm.network.start(name, live)


Download = Callable[..., Awaitable[SharedState | None]]


def download_at(place: Place, config: StateSharingConfig = CONFIG) -> Download:
    """`download_state` of a newcomer."""
    return functools.partial(download_state, place.rpc, place.dht, prefix="trunk", rng=place.rng, config=config)


def with_newcomer(body: Callable[[Swarm, Download], Awaitable[None]]) -> None:
    """Run a body with a newcomer on host "new", which is a client."""

    async def main(swarm: Swarm) -> None:
        async with open_place(swarm, "new", client_mode=True) as place:
            await body(swarm, download_at(place))

    in_swarm(main)


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


@pytest.mark.parametrize("position", [0, 5000, -1])
def test_one_wrong_bit_is_noticed(position: int) -> None:
    """Wherever it is."""
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
    """Before anything is allocated."""
    with pytest.raises(RemoteProtocolError):
        check_table_untrusted(table, max_bytes=10**9)


def test_the_freshest_donor_is_asked() -> None:
    """The donor that is furthest, of three, gives its state; the others are not disturbed."""

    async def body(swarm: Swarm, download: Download) -> None:
        donors = [Donor(version) for version in (5, 9, 7)]
        for number, donor in enumerate(donors):
            start_donor(swarm, f"donor{number}", donor)
        await trio.sleep(1.0)
        assert_same(await download(timeout_s=20.0), state_of(9))
        assert [donor.taken for donor in donors] == [0, 1, 0]

    with_newcomer(body)


def test_one_snapshot_serves_many() -> None:
    """Ten newcomers at once cost a donor one snapshot; one that comes when it is far ahead gets a new one."""

    async def body(swarm: Swarm, download: Download) -> None:
        donor, found = Donor(5), []
        start_donor(swarm, "donor", donor)
        await trio.sleep(1.0)

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

    with_newcomer(body)


def test_a_broken_download_goes_on_where_it_was() -> None:
    """The donor refuses after four pieces, once; the newcomer comes back and fetches only the others."""

    async def body(swarm: Swarm, download: Download) -> None:
        served: list[int] = []
        donor = Donor(4)

        def once_broken(serve: Handler) -> Handler:
            async def answer(request: Request) -> Reply:
                served.append(request.body["index"])
                if len(served) == 5:
                    raise OSError("the disk is full")
                return await serve(request)

            return answer

        start_donor(swarm, "donor", donor, once_broken)
        await trio.sleep(1.0)
        assert_same(await download(timeout_s=30.0), state_of(4))
        assert donor.taken == 1
        assert len(set(served)) == 9
        assert len(served) < 9 + 5

    with_newcomer(body)


def test_nothing_to_be_had_ends_in_time() -> None:
    """Nobody has a state, or none that is late enough: None, when the time is up."""

    async def body(swarm: Swarm, download: Download) -> None:
        began = trio.current_time()
        assert await download(timeout_s=3.0) is None
        start_donor(swarm, "donor", Donor(5))
        await trio.sleep(1.0)
        assert await download(min_version=6, timeout_s=3.0) is None
        assert trio.current_time() - began <= 7.0 + 1e-6

    with_newcomer(body)
