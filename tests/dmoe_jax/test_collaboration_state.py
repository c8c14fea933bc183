"""Decisions of a peer of a collaboration, without network and clock."""

from dataclasses import replace

import numpy as np
import pytest

from dmoe_jax.collaboration import CollaborationConfig
from dmoe_jax.collaboration.state import CollaborationState, UnderWay
from dmoe_net.averaging.collaboration.progress import NO_CHAIN, Forecast, Report, forecast, next_chain
from dmoe_net.averaging.collaboration.rounds import Averaged
from dmoe_net.averaging.grouping.group import MAX_GROUP_SIZE, Role
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


def test_a_peer_that_has_rested_for_a_micro_batch_computes_again(state: CollaborationState) -> None:
    """However quick the others are: it would never learn that it is quicker than it was when it compiled."""
    state.took_in(4, 2.0, 10.0)
    assert [state.is_rested(local_s) for local_s in (10.0, 11.9, 12.0)] == [False, False, True]


def test_a_step_is_due_when_its_group_has_just_time_to_form(state: CollaborationState) -> None:
    """The batch is full at 105; with a full one half of the lead is left, and alone nobody is waited for."""

    def due(*others: Report, now: float = 100.0) -> float | None:
        return state.due(view_of(state, *others), now=now, local_s=now - 100.0)

    assert (due(OTHER), due(OTHER, now=103.5)) == (None, pytest.approx(105.0))
    state.gathered = 90.0
    assert due(OTHER) == 101.0
    assert due(OTHER, AHEAD) is None  # others have made it,
    assert view_of(state, OTHER).fewest == 2
    assert view_of(state, OTHER, AHEAD).fewest > MAX_GROUP_SIZE  # and nobody makes it without them
    state.gathered = 100.0
    assert due() == 100.0
    state.under_way = UnderWay(8.0, 0.0)
    assert due() is None  # nobody knows after what
    state.under_way.is_over = True
    state.begin(100.0)
    assert due() is None  # it comes already


def test_groups_form_for_as_long_as_others_take_to_answer(state: CollaborationState) -> None:
    """Eight times that and a little; up to eight times as long after steps in which nobody was found who was there."""
    view = view_of(state, OTHER)
    assert state.lead_s(view) == 2.0
    state.answer_s = 0.5
    assert state.lead_s(view) == pytest.approx(4.2)
    state.answer_s, quick = 0.05, replace(view, batch_s=0.2)
    assert state.lead_s(quick) == pytest.approx(0.6)
    lost, alone, made_by_others = (True, ()), (False, ()), (True, (AHEAD,))
    for (has_company, ahead), factor in zip([lost] * 4 + [alone, made_by_others], [2, 4, 8, 8, 7.2, 6.48], strict=True):
        state.begin(100.0).has_company = has_company
        state.over(replace(view, ahead=ahead))
        assert state.lead_s(quick) == pytest.approx(0.6 * factor)


def test_a_step_moves_the_chain_and_counts_what_was_in_it(state: CollaborationState) -> None:
    """It began to gather 20 s ago, stopped after one, and averaged for two."""
    mean, state.step = np.zeros(1, np.float32), 1
    averaged = Averaged(mean=mean, weight=100.0, notes=0.0, group_id=b"group", members=tuple(IDS[:2]), attempts=1)
    done = state.settled(UnderWay(40.0, 1.0), averaged, 3.0)
    assert (done.number, done.peers, done.samples, done.own_samples, done.attempts) == (1, 2, 100.0, 40.0, 1)
    assert (done.gathered_s, done.averaged_s) == (23.0, 2.0)
    assert (state.chain, state.trained) == (next_chain(NO_CHAIN, b"group"), 100.0)
    assert (state.totals.steps, state.totals.alone, state.totals.samples, state.totals.whole) == (1, 0, 40.0, 100.0)


def test_who_hears_of_a_beginning_joins_it_and_of_two_the_later_one(state: CollaborationState) -> None:
    view = view_of(state, OTHER)

    def heard(at: float | None, *, step: int = 0, chain: bytes = NO_CHAIN, by: Forecast = view) -> float | None:
        return state.heard((step, chain), at, by, now=100.0, local_s=0.0)

    full, state.gathered = state.gathered, 0.0
    assert heard(101.0, by=view_of(state, replace(OTHER, samples=0.0))) is None  # a batch that is full at 125
    state.gathered = full
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


def test_who_goes_elsewhere_loses_what_it_had_and_who_is_restored_does_not(state: CollaborationState) -> None:
    state.under_way = UnderWay(8.0, 0.0)
    state.moved(1, AHEAD.chain, 100.0, 5.0)
    assert (state.where, state.trained, state.gathered, state.last_step_at) == ((1, AHEAD.chain), 100.0, 0.0, 5.0)
    assert state.totals.samples_lost == 40.0
    restored = CollaborationState(config=CONFIG, chain=NO_CHAIN, since=5.0, last_step_at=5.0)
    restored.restore(1, state.saved(), 6.0)
    assert (restored.where, restored.trained, restored.gathered) == (state.where, 100.0, 0.0)
    assert restored.totals.samples_lost == 0.0
