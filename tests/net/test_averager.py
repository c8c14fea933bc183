"""Averaging as a whole, in virtual time: many peers, several rounds, peers that die; and a hostile or careless one,
which can do nothing to the step of another but cost it that round."""

import random
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from dmoe_net.averaging.averager import Averager, AveragingStep
from dmoe_net.averaging.config import AveragerConfig
from dmoe_net.averaging.drawing import drawn_places, drawn_size, put_back
from dmoe_net.averaging.grouping.group import Group, Member
from dmoe_net.averaging.grouping.group_key import MoshpitGrid, group_key
from dmoe_net.averaging.grouping.join_messages import Candidate, declaration_of, group_body, parse_request_untrusted
from dmoe_net.averaging.opening import open_averager
from dmoe_net.averaging.plan import AveragingPlan
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.averaging.state.sharing import SharedState, StateSource
from dmoe_net.errors import CallRefused
from dmoe_net.identity import Address, Contact
from dmoe_net.rpc.base import Handler, Reply, Request
from dmoe_net.transport.sim import simulate
from dmoe_net.transport.sim.events import HostDown
from dmoe_net.transport.sim.links import Constant, HostOptions
from tests.net.averaging_peers import CONFIG, ROUND_S, SIZE, Peers, open_averaging, vector_of
from tests.net.averaging_swarm import Swarm, open_place, open_place_on, swarm_test
from tests.net.sim_hosts import in_simulation

PLAN = AveragingPlan.of(size=SIZE, grid=MoshpitGrid(side=2))
WEIGHTS = [float(1 + 999 * (index % 5) // 4) for index in range(16)]
"""Samples from 1 to 1000."""


@pytest.mark.parametrize(
    ("side", "dims", "options"),
    [
        pytest.param(4, 2, {}, id="4"),
        pytest.param(8, 2, {}, id="8", marks=pytest.mark.slow),
        pytest.param(4, 2, {"weights": WEIGHTS}, id="weights", marks=pytest.mark.slow),
        pytest.param(4, 1, {"clients": (1, 3)}, id="clients"),
    ],
)
@swarm_test
async def test_a_full_grid_has_the_mean_after_a_round_for_each_axis(
    swarm: Swarm, side: int, dims: int, options: dict[str, Any]
) -> None:
    """Full groups begin at once; all end with the mean by weight, and so do those that cannot be called."""
    count, weights = side**dims, options.get("weights", [1.0] * side**dims)
    peers = Peers(swarm, MoshpitGrid(side=side, dims=dims), count, **options)
    mean = np.average(peers.stacked(), axis=0, weights=weights)
    await peers.rounds(1)
    assert {len(steps[0].peers) for steps in peers.steps.values()} == {side}
    assert dims == 1 or np.abs(peers.stacked() - mean).max() > 0.05
    await peers.rounds(dims)
    np.testing.assert_allclose(
        peers.stacked(), np.broadcast_to(mean, (count, SIZE)), atol=1e-5 if "weights" in options else 1e-6
    )
    assert {round(steps[-1].weight, 9) for steps in peers.steps.values()} == {sum(weights) / count}
    # A full group does not wait for its window to end.
    assert "clients" in options or max(peers.took_s) < CONFIG.assembly.window_s


@pytest.mark.parametrize(
    ("side", "num_dying", "seed"),
    [(4, 1, 0), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 1, 1), (8, 3, 0), (8, 3, 1)))],
)
@swarm_test
async def test_peers_that_die_take_only_their_own_part(swarm: Swarm, side: int, num_dying: int, seed: int) -> None:
    """Steps keep their deadlines, the spread falls by more than the dead could raise it, and the mean stays."""
    peers, rng = Peers(swarm, MoshpitGrid(side=side, dims=2), side**2), random.Random(seed)
    living = list(peers.names)
    spreads = [peers.stacked().std(axis=0).mean()]
    for number in range(6):
        await trio.sleep_until((number + 1) * ROUND_S - 1.0)
        before = peers.stacked(living).astype(np.float64)
        dying = rng.sample(living, num_dying)
        for name in dying:
            swarm.network.start(f"killer-{name}", _kill_later, swarm, name, 1.0 + rng.uniform(0.0, 2.0))
        await trio.sleep_until((number + 2) * ROUND_S - 2.0)
        living = [name for name in living if name not in dying]
        after = peers.stacked(living).astype(np.float64)
        spreads.append(float(after.std(axis=0).mean()))
        # A dead member's values may or may not be in its group's mean: the mean moves by what it took or left.
        moved = np.abs(after.mean(axis=0) - before.mean(axis=0)).max()
        assert moved <= 3 * len(dying) / len(living) * np.abs(before - before.mean(axis=0)).max() + 1e-6
    assert all(len(peers.steps[name]) == 6 for name in living)
    assert max(peers.took_s) <= CONFIG.step_timeout_s + 1e-6
    # Random groups would leave (r - 1) / N + r / N^2 of the variance after a round (the paper's theorem, for N
    # peers in r groups); a grid does better. One round is left over for chance and for the parts of dead reducers.
    count, groups = side**2, side
    factor = ((groups - 1) / count + groups / count**2) ** 0.5
    assert spreads[2] < factor**2 * spreads[0]
    assert spreads[6] < factor**5 * spreads[0]


async def _kill_later(swarm: Swarm, name: str, after_s: float) -> None:
    await trio.sleep(after_s)
    swarm.network.apply(HostDown(name, silent=name.endswith(("1", "3", "5", "7", "9"))))


@pytest.mark.parametrize(
    ("vector", "weight", "message"),
    [
        (np.zeros(SIZE, np.float64), 1.0, "float32"),
        (np.zeros(SIZE + 1, np.float32), 1.0, "51"),
        (np.zeros(2 * SIZE, np.float32)[::2], 1.0, "contiguous"),
        (None, 1.0, "auxiliary"),
        (np.zeros(SIZE, np.float32), 0.0, "weight"),
        (np.zeros(SIZE, np.float32), float("nan"), "weight"),
    ],
)
@swarm_test
async def test_what_cannot_be_averaged_is_refused(swarm: Swarm, vector: Any, weight: float, message: str) -> None:
    async with open_averaging(swarm, "one", PLAN) as averager:
        with pytest.raises(ValueError, match=message):
            await averager.step(vector, weight=weight)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [({"prefix": "a.b"}, "prefix"), ({"prefix": ""}, "prefix"), ({"config": replace(CONFIG, cell=4)}, "0 to 3")],
)
@swarm_test
async def test_wrong_settings_are_refused(swarm: Swarm, wishes: dict[str, Any], message: str) -> None:
    """They are refused before anything is served."""
    with pytest.raises(ValueError, match=message):
        async with open_averaging(swarm, "one", PLAN, **wishes):
            raise AssertionError("it was opened")


@swarm_test
async def test_one_step_at_a_time(swarm: Swarm) -> None:
    async with open_averaging(swarm, "one", PLAN) as averager:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(averager.step, np.zeros(SIZE, np.float32))
            await trio.sleep(1.0)
            with pytest.raises(RuntimeError, match="one step"):
                await averager.step(np.zeros(SIZE, np.float32))
        assert averager.round_number == 1


async def snapshot() -> SharedState:
    return SharedState(version=7, tensors=(vector_of("state"),))


SOURCE = StateSource(lambda: 7, snapshot)


@swarm_test
async def test_a_newcomer_takes_the_whole_state(swarm: Swarm) -> None:
    async def live() -> None:
        async with open_averaging(swarm, "old", PLAN, state=SOURCE):
            await trio.sleep_forever()

    swarm.network.start("old", live)
    await trio.sleep(1.0)
    async with open_averaging(swarm, "new", PLAN) as averager:
        state = await averager.download_state(timeout_s=10.0)
        np.testing.assert_array_equal(state.tensors[0], vector_of("state"))
        assert await averager.download_state(min_version=8, attempts=2) is None


@swarm_test
async def test_a_prefix_is_free_again_after_its_averager(swarm: Swarm) -> None:
    """It is so also after one that could not be opened; in between its calls are refused."""
    async with open_place(swarm, "peer") as place, open_place(swarm, "other") as other:
        opening = partial(open_averager, place.rpc, place.dht, PLAN, prefix="x", rng=place.rng, state=SOURCE)

        async def check_refused(name: str, why: str) -> None:
            with pytest.raises(CallRefused, match=why):
                await other.rpc.call(place.rpc.address, f"averaging.{PLAN.within('x')}.{name}", {}, timeout_s=5.0)

        for cell in (0, 0, 4, 0):
            opened = opening(config=replace(CONFIG, cell=cell))
            if cell == 4:
                with pytest.raises(ValueError, match="cells go from 0 to 3"):
                    await opened.__aenter__()
                continue
            async with opened:
                await check_refused("reduce", r"^(?!unknown)")
            for name in ("reduce", "ask", "join"):
                await check_refused(name, "unknown method")


GRID = MoshpitGrid(side=2, dims=1)
SCHEMALESS = AveragingPlan.of(size=SIZE, grid=GRID, schema="")
PREFIX = SCHEMALESS.within("x")
KEY = group_key(PREFIX, GRID, 0, 0)


async def refuse(_: Request) -> Reply:
    raise CallRefused("no")


async def silent(_: Request) -> Reply:
    await trio.sleep_forever()
    return Reply()


async def lead(swarm: Swarm, reduce: Handler, after_s: float = 0.0) -> None:
    """One that has everybody, and begins at once, with one group id for all of its groups."""
    async with open_place(swarm, "evil") as place:
        contact = Contact(place.rpc.peer_id, place.rpc.address)

        def expiration() -> float:
            return place.dht.clock.now() + 0.5

        async def ask(_: Request) -> Reply:
            return Reply(body={"expiration": expiration()})

        async def join(request: Request) -> Reply:
            victim = parse_request_untrusted(request.body, request.peer_id).member
            own = Member(peer_id=contact.peer_id, address=contact.address, wanted_slot=1)
            return Reply(body=group_body(Group(group_id=b"\7" * 16, members=(victim, own), side=2)))

        await trio.sleep(after_s)
        for name, handler in {"ask": ask, "join": join, "reduce": reduce}.items():
            place.rpc.add_handler(f"averaging.{PREFIX}.{name}", handler)
        while True:
            await place.dht.store(KEY, declaration_of(Candidate(contact=contact, expiration=expiration())), life_s=1.0)
            await trio.sleep(0.3)


open_ann = partial(open_averaging, name="ann", plan=SCHEMALESS)


@pytest.mark.parametrize("is_alone", [True, pytest.param(False, marks=pytest.mark.slow)])
@swarm_test
async def test_a_peer_that_finds_no_group_keeps_its_own(swarm: Swarm, is_alone: bool) -> None:
    """Nobody else is there, or one whose group id was used before, which is no group: the step ends at its deadline."""
    if not is_alone:
        swarm.network.start("evil", lead, swarm, refuse)
    async with open_ann(swarm, config=replace(CONFIG, cell=0)) as averager:
        await trio.sleep_until(5.0)
        done = await averager.step(vector_of("ann"))
        assert trio.current_time() <= 5.0 + CONFIG.step_timeout_s + 1e-6
        assert done.received == 0.0
        assert not is_alone or len(done.peers) == 1
        np.testing.assert_array_equal(done.average, vector_of("ann"))


@swarm_test
async def test_a_step_ends_by_its_deadline_whoever_does_not_answer(swarm: Swarm) -> None:
    """A group that is found late has what is left of the step's time, and not an all-reduce's own."""
    swarm.network.start("evil", lead, swarm, silent, 60.0)  # it appears five seconds before the end
    async with open_ann(swarm, config=AveragerConfig(cell=0)) as averager:
        await trio.sleep_until(5.0)
        done = await averager.step(vector_of("ann"))
        assert trio.current_time() <= 5.0 + 60.0 + 1e-6
        assert np.isfinite(done.average).all()


@swarm_test
async def test_a_vector_that_is_not_finite_is_refused_before_anybody_waits_for_it(swarm: Swarm) -> None:
    async with open_ann(swarm) as averager:
        vector = vector_of("ann").copy()
        vector[3] = np.nan
        began = trio.current_time()
        with pytest.raises(ValueError, match="not finite"):
            await averager.step(vector)
        assert trio.current_time() == began


MB = 8e6
"""A megabyte a second, as hosts have it: in bits."""
LARGE_PLAN = AveragingPlan.of(size=500_000, grid=MoshpitGrid(side=2, dims=1))


@in_simulation
async def test_a_state_that_was_downloaded_tells_of_the_line() -> None:
    """12 MB over a line of 4 MB a second down, from a donor that is faster; what the user says of the line stands."""
    state = SharedState(version=7, tensors=(np.zeros(3_000_000, np.float32),))

    async def snapshot() -> SharedState:
        return state

    lines, averagers = {"donor": HostOptions(), "newcomer": HostOptions(down_bps=4 * MB)}, list[Averager]()
    async with AsyncExitStack() as stack:
        opened = stack.enter_async_context
        network = await opened(simulate(latency=Constant(0.02), hosts=lines.__getitem__))
        for host in lines:
            place = await opened(open_place_on(network, host, random.Random(host), root=Address("donor", 1)))
            source = StateSource(lambda: 7, snapshot) if host == "donor" else None
            settings = {"state": source, "config": AveragerConfig(speeds=Speeds(up=5e5))}
            averager = open_averager(place.rpc, place.dht, LARGE_PLAN, prefix="x", rng=place.rng, **settings)
            averagers.append(await opened(averager))
        _, newcomer = averagers
        assert newcomer.known_speeds() == Speeds(up=5e5)
        assert await newcomer.download_state(min_version=1, timeout_s=60.0) is not None
        # Finding the donor, and the round trips of its pieces, take their time, too.
        assert newcomer.known_speeds().up == 5e5
        assert 3e6 < (newcomer.known_speeds().down or 0.0) <= 4e6


def test_places_are_distinct_fair_and_the_same_for_all() -> None:
    """Each of 1,000 numbers is in one of ten draws of 100; another group draws others."""
    draws = [drawn_places(number.to_bytes(16), 1000, 100) for number in range(2000)]
    assert all(np.all(np.diff(places) > 0) and places[0] >= 0 and places[-1] < 1000 for places in draws)
    counts = np.bincount(np.concatenate(draws), minlength=1000)
    # 2,000 draws with chance 0.1: 200 expected, standard deviation 13.4; the furthest of 1,000 is within 5 of these.
    assert abs(counts - 200).max() < 67
    np.testing.assert_array_equal(drawn_places(b"group", 1000, 100), drawn_places(b"group", 1000, 100))
    assert not np.array_equal(draws[0], draws[1])


@pytest.mark.parametrize(("size", "count"), [(1, 1), (7, 7), (7, 5), (2**33, 3)])
def test_places_of_odd_sizes(size: int, count: int) -> None:
    """All places are drawn, most of them, or a few of very many."""
    places = drawn_places(b"group", size, count)
    assert len(set(places.tolist())) == count
    assert 0 <= places.min() <= places.max() < size


def test_what_the_network_must_agree_on_does_not_change() -> None:
    """Peers of other versions of this code and of NumPy draw the same: these were computed once."""
    assert drawn_places(b"\0" * 16, 100, 5).tolist() == [0, 33, 59, 76, 84]


def test_sizes_and_shares() -> None:
    """A draw has at least one number and at most all; a share is above 0 and at most 1."""
    assert [drawn_size(1000, share) for share in (1e-9, 0.005, 0.0051, 1.0)] == [1, 5, 6, 1000]
    for wrong in (0.0, -1.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            drawn_size(10, wrong)
    whole = np.arange(5, dtype=np.float32)
    places = np.array([1, 4])
    np.testing.assert_array_equal(put_back(whole, places, np.float32([7, 8])), [0, 7, 2, 3, 8])
    np.testing.assert_array_equal(whole, np.arange(5))


@swarm_test
async def test_a_group_averages_a_few_numbers_and_leaves_the_rest(swarm: Swarm) -> None:
    """Three peers: a tenth of each vector becomes the mean of all three, the same places at all; few bytes travel."""
    vectors = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32)
    plan = AveragingPlan.of(size=1000, grid=MoshpitGrid(side=3, dims=1), share=0.1)
    steps: dict[int, AveragingStep] = {}

    async def average(number: int) -> None:
        async with open_averaging(swarm, f"peer{number}", plan) as averager:
            steps[number] = await averager.step(vectors[number])
            await trio.sleep_forever()

    for number in range(3):
        swarm.network.start(f"peer{number}", average, number)
    await trio.sleep(100.0)
    changed = [steps[number].average != vectors[number] for number in range(3)]
    for step, own in zip(steps.values(), [changed[number] for number in steps], strict=True):
        assert (len(step.peers), step.received, int(own.sum())) == (3, 1.0, 100)
        np.testing.assert_array_equal(own, changed[0])
        np.testing.assert_allclose(step.average[own], vectors.mean(axis=0)[own], rtol=1e-5, atol=1e-6)
        # 2 (n - 1) / n of 100 float32, up to how parts are cut.
        assert 400 <= step.moved_bytes <= 700
