"""Several donors of one state at once, good and bad."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio

from dmoe_net.averaging.state.buffer import StateBuffer, pack, piece_hash
from dmoe_net.averaging.state.download import StateUnavailable
from dmoe_net.averaging.state.sharing import StateSharingConfig
from dmoe_net.errors import CallRefused
from dmoe_net.rpc.base import Handler, Reply, Request
from tests.net.averaging_swarm import Swarm
from tests.net.test_state_download import start_liar
from tests.net.test_state_sharing import CONFIG, Donor, Download, assert_same, start_donor, state_of, with_newcomer


def offer_of(state: StateBuffer) -> dict[str, Any]:
    """Offer of a state, as a donor of version 8 makes it."""
    return {"version": 8, "digest": state.digest, "table": state.table, "facts": {}, "chunk_bytes": 1000}


def test_several_donors_give_one_state_together() -> None:
    """Three that have the very same: each gives some pieces, and takes one snapshot."""

    async def body(swarm: Swarm, download: Download) -> None:
        served: dict[str, int] = {}
        donors = {f"donor{number}": Donor(8) for number in range(3)}

        def counting(name: str) -> Callable[[Handler], Handler]:
            def wrap(serve: Handler) -> Handler:
                async def answer(request: Request) -> Reply:
                    served[name] = served.get(name, 0) + 1
                    await trio.sleep(0.2)  # or the first would have given all before the second is asked
                    return await serve(request)

                return answer

            return wrap

        for name, donor in donors.items():
            start_donor(swarm, name, donor, counting(name))
        await trio.sleep(1.0)
        assert_same(await download(timeout_s=20.0), state_of(8))
        assert served.keys() == donors.keys()
        assert sum(served.values()) == 9  # of 8.4 kB in pieces of 1000 bytes, each once
        assert [donor.taken for donor in donors.values()] == [1, 1, 1]

    with_newcomer(body)


@pytest.mark.parametrize("fault", ["lies", "refuses", "falls silent"])
def test_one_bad_donor_of_three_costs_its_pieces(fault: str) -> None:
    """Nothing is fetched anew but the pieces that were asked of it; a silent one is not waited for."""

    async def body(swarm: Swarm, download: Download) -> None:
        good: list[int] = []

        def bad(serve: Handler) -> Handler:
            async def answer(request: Request) -> Reply:
                if fault == "falls silent":
                    await trio.sleep_forever()
                if fault == "refuses":
                    raise CallRefused("not today")
                (piece,) = (await serve(request)).tensors
                return Reply(tensors=(np.zeros_like(piece),))

            return answer

        def honest(serve: Handler) -> Handler:
            async def answer(request: Request) -> Reply:
                good.append(request.body["index"])
                await trio.sleep(0.2)
                return await serve(request)

            return answer

        for name, wrap in (("bad", bad), ("good0", honest), ("good1", honest)):
            start_donor(swarm, name, Donor(8), wrap)
        await trio.sleep(1.0)
        began = trio.current_time()
        assert_same(await download(timeout_s=60.0), state_of(8))
        assert trio.current_time() - began < CONFIG.call_timeout_s
        assert sorted(good) == sorted(set(good)) == list(range(9))

    with_newcomer(body)


def test_hashes_that_are_a_lie_ban_those_who_vouch_for_them_and_nobody_else() -> None:
    """The liar's own pieces have its hashes, but the whole does not have the digest; the honest donor of that very
    digest is asked next."""
    expected = pack(state_of(8).tensors)

    async def body(swarm: Swarm, download: Download) -> None:
        donor = Donor(8)
        start_donor(swarm, "honest", donor)
        wrong = [piece_hash(np.zeros(len(expected.buffer[at : at + 1000]), np.uint8)) for at in range(0, 9000, 1000)]
        hashes = np.frombuffer(b"".join(wrong[: -(-expected.buffer.nbytes // 1000)]), np.uint8).reshape(-1, 32)

        async def false(request: Request) -> Reply:
            start = 1000 * request.body["index"]
            return Reply(tensors=(np.zeros(len(expected.buffer[start : start + 1000]), np.uint8),))

        async def offer(place: Any) -> Reply:
            return Reply(body=offer_of(expected), tensors=(hashes,))

        start_liar(swarm, offer, false)
        await trio.sleep(1.0)
        assert_same(await download(timeout_s=60.0), state_of(8))
        assert donor.taken == 1

    with_newcomer(body)


def test_an_offer_without_sound_hashes_is_none() -> None:
    """None, too few, or of another kind: that donor is not asked again, and gives no piece."""
    packed = pack(state_of(8).tensors)
    asked: list[int] = []

    async def piece(request: Request) -> Reply:
        asked.append(request.body["index"])
        return Reply(tensors=(packed.chunk(request.body["index"], 1000),))

    async def body(swarm: Swarm, download: Download) -> None:
        wrong: list[tuple[Any, ...]] = [(), (np.zeros((8, 32), np.uint8),), (np.zeros((9, 32), np.float32),)]
        offers = iter(wrong)

        async def offer(place: Any) -> Reply:
            return Reply(body=offer_of(packed), tensors=next(offers))

        start_liar(swarm, offer, piece)
        await trio.sleep(1.0)
        for _ in wrong:
            with pytest.raises(StateUnavailable):
                await download(timeout_s=5.0, attempts=3)
        assert not asked
        assert next(offers, None) is None

    with_newcomer(body)


@pytest.mark.parametrize("changes", [{"max_donors": 0}, {"chunk_bytes": 2**24 + 1}, {"window": 0}])
def test_state_configs_that_cannot_be(changes: dict[str, int]) -> None:
    """The message names the field."""
    with pytest.raises(ValueError, match=next(iter(changes))):
        StateSharingConfig(**changes)
