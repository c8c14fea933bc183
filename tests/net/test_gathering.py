"""Payloads that each member of a group gets from all others: who is there, who dies, and who lies."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio

from dmoe_net.averaging.gathering import (
    BROKE_RULES,
    SILENT,
    UNREACHABLE,
    GatherConfig,
    SparseLayout,
    inline,
    mean_untrusted,
)
from dmoe_net.errors import CallRefused
from dmoe_net.identity import PeerId
from dmoe_net.transport.sim.events import Partition
from dmoe_net.types import Array
from dmoe_net.wire.sparse import (
    SparseBlocks,
    SparseCoding,
    SparseVector,
    all_gather_nbytes,
    all_reduce_nbytes,
    encode_sparse,
    mean_of_sparse,
    sparse_nbytes,
)
from tests.net.gathering_group import CONFIG, NBYTES, Members, T, open_group, payload_of
from tests.net.sim_hosts import in_simulation

STARTS = range(0, NBYTES, 100)
GONE = Partition((frozenset({"host3"}),))
"""The fourth member hears nothing and says nothing any more."""


def assert_all_have(found: dict[int, Any], places: set[int]) -> None:
    """Just these payloads, whole, in the order of the group."""
    for gathered in found.values():
        assert list(gathered.payloads) == sorted(places)
        for place in places:
            np.testing.assert_array_equal(gathered.payloads[place], payload_of(place))


@pytest.mark.parametrize("clients", [(), (1,), (0, 2, 3)], ids=["nodes", "a client", "one node alone"])
@in_simulation
async def test_everybody_gets_what_everybody_has(clients: tuple[int, ...]) -> None:
    """A client brings its payload to each node, and fetches all others from them; whoever can be called is brought."""
    async with open_group(4, clients) as members:
        found = await members.gather(range(4))
        assert len(found) == 4
        assert_all_have(found, {0, 1, 2, 3})
        assert not any(gathered.lost for gathered in found.values())
        for place, gathered in found.items():
            if place in clients:
                assert gathered.sent_bytes == (4 - len(clients)) * NBYTES
            elif not clients:
                assert gathered.sent_bytes == 3 * NBYTES


@in_simulation
async def test_a_payload_that_reached_one_living_node_reaches_all() -> None:
    """The fourth brings its whole payload to one member, and dies: the others ask that one, and all have the same."""
    async with open_group(4) as members:

        async def bring_and_die() -> None:
            await members.bring(3, 1, STARTS)
            members.network.apply(GONE)

        assert_all_have(await members.gather([0, 1, 2], meanwhile=bring_and_die), {0, 1, 2, 3})
        assert trio.current_time() < 3 * T


@pytest.mark.parametrize("client", [(), (2,)], ids=["nodes", "with a client"])
@in_simulation
async def test_who_dies_midway_is_left_out_everywhere(client: tuple[int, ...]) -> None:
    """It has brought half of its payload to all: nobody waits for long, and all have the other three."""
    async with open_group(4, client) as members:

        async def bring_half_and_die() -> None:
            for place in (0, 1):
                await members.bring(3, place, STARTS[:5])
            members.network.apply(GONE)

        found = await members.gather([0, 1, 2], meanwhile=bring_half_and_die)
        assert_all_have(found, {0, 1, 2})
        assert {why for gathered in found.values() for why in gathered.lost.values()} <= {SILENT, UNREACHABLE}
        assert all(set(gathered.lost) == {3} for gathered in found.values())
        assert T < trio.current_time() < 4 * T


@pytest.mark.parametrize(
    ("starts", "piece", "fields", "message"),
    [
        ([0], np.zeros(99, np.uint8), {}, "expected one tensor of 100 bytes"),
        ([900], np.zeros(100, np.uint8), {}, "expected one tensor of 50 bytes"),
        ([0], np.zeros(25, np.float32), {}, "expected one tensor of 100 bytes"),
        ([50], None, {}, "no piece of 100 bytes begins at 50"),
        ([1000], None, {}, "no piece of 100 bytes begins at 1000"),
        ([0], None, {"size": 2**40}, f"payloads of this group have {NBYTES} bytes, not {2**40}"),
        ([0], None, {"start": -1}, "start must be an integer"),
        ([0, 0], None, {}, "this piece came before"),
        ([0], None, {"group": b"h" * 16}, "does not gather with group"),
    ],
)
@in_simulation
async def test_pieces_that_are_none_are_refused(
    starts: list[int], piece: Any, fields: dict[str, Any], message: str
) -> None:
    """Their sender is told why, and is out if it broke the form; the others have what they have without it."""
    async with open_group(3) as members:

        async def bring_wrongly() -> None:
            with pytest.raises(CallRefused, match=re.escape(message)):
                await members.bring(2, 0, starts, piece, **fields)
            if piece is not None:
                with pytest.raises(CallRefused, match="too late"):
                    await members.bring(2, 0, [0])

        found = await members.gather([0, 1], meanwhile=bring_wrongly)
        assert_all_have(found, {0, 1})
        assert set(found[0].lost) == {2}
        assert (found[0].lost[2] == BROKE_RULES) == (piece is not None)


@in_simulation
async def test_strangers_bring_and_fetch_nothing() -> None:
    async with open_group(3) as members:
        group, fetch = members.group, "averaging.x.fetch"
        members.group = replace(group, members=group.members[:2], side=2)

        async def ask() -> None:
            await trio.sleep(1.0)
            contact = group.members[0].contact
            asked = {"group": group.group_id, "size": NBYTES, "start": 0}
            with pytest.raises(CallRefused, match="no payload in this group"):
                await members.bring(2, 0, [0])
            for caller, of, message in ((2, 0, "you have no payload"), (1, 2, "no payload of member 2"), (1, -1, "of")):
                with pytest.raises(CallRefused, match=message):
                    await members.callers[caller].call(contact, fetch, {**asked, "of": of}, timeout_s=5.0)
            # Its own gathering is over: what it holds is still given.
            reply = await members.callers[1].call(contact, fetch, {**asked, "of": 1}, timeout_s=5.0)
            np.testing.assert_array_equal(reply.tensors[0], payload_of(1)[:100])

        await members.gather([0, 1], meanwhile=ask)


CODING = SparseCoding(block_size=16, kept=4)
SIZES = (40, 7)


def vector_of(seed: int, coding: SparseCoding = CODING, sizes: tuple[int, ...] = SIZES) -> SparseVector:
    """With as many values as there is room for."""
    rng, parts = np.random.default_rng(seed), list[SparseBlocks]()
    for group in (group for size in sizes for group in coding.blocks(size)):
        shape = (group.num_blocks, group.kept)
        indices = np.argsort(rng.random((group.num_blocks, group.length)), axis=1)[:, : group.kept].astype(np.int32)
        levels = (rng.integers(2, 4, shape) * rng.choice([-1, 1], shape)).astype(np.int8)
        parts.append(SparseBlocks(indices, levels, rng.random(group.num_blocks).astype(np.float32) + 0.5))
    return SparseVector(coding=coding, sizes=sizes, parts=tuple(parts))


async def averaged(
    members: Members, vectors: dict[int, SparseVector], config: GatherConfig = CONFIG, **options: Any
) -> dict[int, tuple[Array, dict[PeerId, str], int]]:
    """The mean that each member comes to, who is missing in it and why, and the bytes that it has sent."""
    payloads = {place: np.frombuffer(encode_sparse(vector), np.uint8) for place, vector in vectors.items()}
    layout = SparseLayout(coding=vectors[0].coding, sizes=vectors[0].sizes)
    return {
        place: (*await mean_untrusted(gathered, members.group, layout, inline), gathered.sent_bytes)
        for place, gathered in (await members.gather(vectors, config, payloads, **options)).items()
    }


@pytest.mark.parametrize("is_there", [True, False])
@in_simulation
async def test_all_hold_the_same_weighted_mean(is_there: bool) -> None:
    """All have it to the last bit; a payload of the right length that is no vector is left out by all."""
    vectors = {place: vector_of(place) for place in range(3 if is_there else 2)}
    async with open_group(3) as members:

        async def bring_anything() -> None:
            nbytes = sparse_nbytes(CODING, SIZES)
            for place in () if is_there else (0, 1):
                await members.bring(2, place, [0], np.full(nbytes, 255, np.uint8), size=nbytes)

        found = await averaged(members, vectors, meanwhile=bring_anything)
        expected = mean_of_sparse([*vectors.values()], [1.0, 2.0, 3.0][: len(vectors)])
        assert len(found) == len(vectors)
        for mean, lost, _ in found.values():
            np.testing.assert_array_equal(mean, expected)
            assert lost == ({} if is_there else {members.group.members[2].peer_id: BROKE_RULES})


@pytest.mark.parametrize(("kept", "least"), [(64, 90), (48, 100)])
@in_simulation
async def test_a_million_values_take_a_hundredth_of_float32(kept: int, least: float) -> None:
    """All that the network delivers is counted. Payloads are 195 times smaller than float32 vectors; of these an
    all-reduce moves 1.5 for each member and an all-gather three payloads: half, so the second bound is 90."""
    coding, size = SparseCoding(kept=kept), 1_000_000
    vectors = {place: vector_of(place, coding, (size,)) for place in range(4)}
    async with open_group(4) as members:
        before = members.network.statistics().nbytes
        found = await averaged(members, vectors, GatherConfig())
        delivered = members.network.statistics().nbytes - before
        assert not any(lost for _, lost, _ in found.values())
        assert {sent_bytes for *_, sent_bytes in found.values()} == {all_gather_nbytes(coding, (size,), 4)}
        assert delivered * 100 <= 4 * 3 * 4 * size
        assert delivered * least <= 4 * all_reduce_nbytes(size, 4)


def test_what_cannot_be_gathered_is_refused() -> None:
    layout = SparseLayout(coding=CODING, sizes=SIZES)
    with pytest.raises(ValueError, match="expected a sparse vector of 47 values"):
        layout.check(vector_of(0, CODING, (48,)))
    with pytest.raises(ValueError, match="at least one value"):
        SparseLayout(coding=CODING, sizes=())
    nbytes = 8 * sparse_nbytes(CODING, SIZES)
    layout.check_memory(8, GatherConfig(max_bytes=nbytes))
    with pytest.raises(ValueError, match=f"take {nbytes} bytes of memory, more than the {nbytes - 1}"):
        layout.check_memory(8, GatherConfig(max_bytes=nbytes - 1))
    for wrong in ({"chunk_bytes": 0}, {"sender_timeout_s": 0.0}, {"sender_timeout_s": 1e9}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            GatherConfig(**wrong)  # type: ignore[arg-type]
