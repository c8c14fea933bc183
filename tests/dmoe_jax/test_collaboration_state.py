"""Decisions of a peer of a collaboration, without network and clock."""

from dataclasses import replace

import pytest

from dmoe_jax.collaboration import CollaborationConfig
from dmoe_jax.collaboration.state import CollaborationState, UnderWay
from dmoe_net.averaging.collaboration.progress import NO_CHAIN, Forecast, Report, forecast, next_chain
from dmoe_net.averaging.grouping.group import Role
from dmoe_net.identity import Address, PeerId

IDS = [PeerId(bytes([number]) * 32) for number in range(3)]
CONFIG = CollaborationConfig(target_batch_size=100, lead_s=2.0, late_s=10.0)
OTHER = Report(
    peer_id=IDS[1],
    address=Address("host", 1),
    role=Role.NODE,
    step=0,
    chain=NO_CHAIN,
    samples=40.0,
    rate=2.0,
    at=100.0,
    trained=0.0,
)
"""Alone it needs 30 s more; with one like it, 5."""
AHEAD = replace(OTHER, peer_id=IDS[2], step=1, chain=next_chain(NO_CHAIN, b"group"), trained=100.0)


@pytest.fixture
def state() -> CollaborationState:
    """One that has ended ten micro-batches of four samples and two seconds; its own time is swarm time less 100."""
    made = CollaborationState(config=CONFIG, chain=NO_CHAIN, since=-20.0, last_step_at=-20.0)
    for number in range(10):
        made.took_in(4, 2.0, -18.0 + 2 * number)
        made.goes_on(-18.0 + 2 * number)
    return made


def view_of(state: CollaborationState, *others: Report, now: float = 100.0) -> Forecast:
    own = state.report(IDS[0], Address("host", 0), Role.NODE, now=now, local_s=now - 100)
    return forecast(own, others, target=CONFIG.target_batch_size, now=now)


def test_a_report_counts_the_micro_batch_that_is_computed(state: CollaborationState) -> None:
    """Up to the whole of it; and from whoever waits too, unless it has brought nothing to the batch."""
    for now, samples in ((100.0, 40.0), (101.0, 42.0), (110.0, 44.0)):
        own = state.report(IDS[0], None, Role.CLIENT, now=now, local_s=now - 100)
        assert (own.samples, own.rate, own.address) == (samples, 2.0, None)
    state.took_in(4, 2.0, 2.0)
    assert view_of(state, now=103.0).samples == 46.0
    state.gathered = 0.0
    assert view_of(state, now=103.0).rate == 0.0


def test_who_hears_of_a_beginning_joins_it_and_of_two_the_later_one(state: CollaborationState) -> None:
    view = view_of(state, OTHER)

    def heard(at: float | None, *, step: int = 0, chain: bytes = NO_CHAIN) -> float | None:
        return state.heard((step, chain), at, view, now=100.0, local_s=0.0)

    assert heard(104.0, step=1) is None
    assert heard(104.0, chain=AHEAD.chain) is None
    assert heard(None) is None
    assert heard(1e6) is None
    assert state.coming is None
    assert heard(104.0) == 104.0
    assert heard(103.0) == 104.0
    assert heard(105.0) == 105.0
    assert heard(None) == 105.0
    assert state.ends_at(view) == pytest.approx(105.0)
    state.coming.is_found = True
    assert heard(None) is None


def test_a_batch_that_is_far_from_full_begins_for_nobody(state: CollaborationState) -> None:
    state.gathered = 0.0
    far = view_of(state, replace(OTHER, samples=0.0))  # full at 125
    assert state.heard((0, NO_CHAIN), 101.0, far, now=100.0, local_s=0.0) is None
    assert state.coming is None


def test_who_goes_elsewhere_loses_what_it_had_and_who_is_restored_does_not(state: CollaborationState) -> None:
    state.under_way = UnderWay(8.0, 0.0)
    state.moved(1, AHEAD.chain, 100.0, 5.0)
    assert (state.where, state.trained, state.gathered, state.last_step_at) == ((1, AHEAD.chain), 100.0, 0.0, 5.0)
    assert state.totals.samples_lost == 40.0
    restored = CollaborationState(config=CONFIG, chain=NO_CHAIN, since=5.0, last_step_at=5.0)
    restored.restore(1, state.saved(), 6.0)
    assert (restored.where, restored.trained, restored.gathered) == (state.where, 100.0, 0.0)
    assert restored.totals.samples_lost == 0.0
