"""One hostile or careless member can do nothing to another's step but cost it that round."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest
import trio

from dmoe_net.averaging.averager import Averager
from dmoe_net.averaging.config import AveragerConfig
from dmoe_net.averaging.grouping.group import Group, Member
from dmoe_net.averaging.grouping.group_key import MoshpitGrid, group_key
from dmoe_net.averaging.grouping.join_messages import (
    Candidate,
    declaration_of,
    group_body,
    parse_request_untrusted,
)
from dmoe_net.averaging.opening import open_averager
from dmoe_net.averaging.plan import AveragingPlan
from dmoe_net.errors import CallRefused
from dmoe_net.identity import Contact
from dmoe_net.rpc.base import Handler, Reply, Request
from tests.net.averaging_peers import CONFIG, SIZE, vector_of
from tests.net.averaging_swarm import Place, Swarm, in_swarm, open_place

GRID = MoshpitGrid(side=2, dims=1)
PREFIX = AveragingPlan.of(size=SIZE, grid=GRID, schema="").within("x")
KEY = group_key(PREFIX, GRID, 0, 0)


async def refuse(_: Request) -> Reply:
    raise CallRefused("no")


async def silent(_: Request) -> Reply:
    await trio.sleep_forever()
    return Reply()


def start_leader(swarm: Swarm, *, reduce: Handler = refuse, after_s: float = 0.0) -> None:
    """One that has everybody, and begins at once, with one group id for all of its groups."""

    async def live() -> None:
        async with open_place(swarm, "evil") as place:
            await trio.sleep(after_s)
            await lead(place, reduce)

    swarm.network.start("evil", live)


async def lead(place: Place, reduce: Handler) -> None:
    address = place.rpc.address
    assert address is not None

    def expiration() -> float:
        return place.dht.clock.now() + 0.5

    async def ask(_: Request) -> Reply:
        return Reply(body={"expiration": expiration()})

    async def join(request: Request) -> Reply:
        victim = parse_request_untrusted(request.body, request.peer_id).member
        own = Member(peer_id=place.rpc.peer_id, address=address, wanted_slot=1)
        return Reply(body=group_body(Group(group_id=b"\7" * 16, members=(victim, own), side=2)))

    for name, handler in {"ask": ask, "join": join, "reduce": reduce}.items():
        place.rpc.add_handler(f"averaging.{PREFIX}.{name}", handler)
    while True:
        candidate = Candidate(contact=Contact(place.rpc.peer_id, address), expiration=expiration())
        await place.dht.store(KEY, declaration_of(candidate), life_s=1.0)
        await trio.sleep(0.3)


def with_averager(
    body: Callable[[Averager], Awaitable[None]],
    before: Callable[[Swarm], None] = lambda swarm: None,
    config: AveragerConfig = CONFIG,
) -> None:
    """Run a body five seconds after `before`."""

    async def main(swarm: Swarm) -> None:
        before(swarm)
        async with (
            open_place(swarm, "ann") as place,
            open_averager(
                *(place.rpc, place.dht, AveragingPlan.of(size=SIZE, grid=GRID)),
                prefix="x",
                rng=place.rng,
                config=replace(config, cell=0),
            ) as averager,
        ):
            await trio.sleep_until(5.0)
            await body(averager)

    in_swarm(main)


def test_a_group_id_that_was_used_before_is_no_group() -> None:
    """The step goes on looking, and ends at its deadline with what it had."""

    async def body(averager: Averager) -> None:
        done = await averager.step(vector_of("ann"))
        assert done.received == 0.0
        np.testing.assert_array_equal(done.average, vector_of("ann"))

    with_averager(body, start_leader)


def test_a_step_ends_by_its_deadline_whoever_does_not_answer() -> None:
    """A group that is found late has what is left of the step's time, and not an all-reduce's own."""

    async def body(averager: Averager) -> None:
        began = trio.current_time()
        done = await averager.step(vector_of("ann"))
        assert trio.current_time() - began <= 60.0 + 1e-6
        assert np.isfinite(done.average).all()

    # It appears five seconds before the end.
    with_averager(body, lambda swarm: start_leader(swarm, reduce=silent, after_s=60.0), AveragerConfig())


def test_a_vector_that_is_not_finite_is_refused_before_anybody_waits_for_it() -> None:
    """At once, by the error that the docstring names."""

    async def body(averager: Averager) -> None:
        vector = vector_of("ann").copy()
        vector[3] = np.nan
        began = trio.current_time()
        with pytest.raises(ValueError, match="not finite"):
            await averager.step(vector)
        assert trio.current_time() == began

    with_averager(body)
