"""Progress of each peer, and the time at which the batch will be full."""

import math
from dataclasses import replace

import pytest

from dmoe_net.averaging.collaboration.progress import (
    NO_CHAIN,
    Pace,
    Report,
    forecast,
    next_chain,
    parse_report_untrusted,
    report_to_wire,
    reports_in_untrusted,
)
from dmoe_net.averaging.grouping.group import Role
from dmoe_net.dht.entries import Found
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Address, PeerId

IDS = [PeerId(bytes([number]) * 32) for number in range(1, 6)]


def report(number: int, **changes: object) -> Report:
    own = Report(
        peer_id=IDS[number],
        address=Address("host", 7),
        role=Role.NODE,
        step=3,
        chain=NO_CHAIN,
        samples=10.0,
        rate=2.0,
        at=100.0,
        trained=300.0,
    )
    return replace(own, **changes)  # type: ignore[arg-type]


def test_the_end_is_where_all_together_reach_the_target() -> None:
    own, others = report(0), [report(1, rate=3.0, at=98.0), report(2, samples=0.0, rate=5.0)]
    view = forecast(own, others, target=110, now=102.0)
    # 10 + 2 * 2, 10 + 3 * 4, 0 + 5 * 2 samples by now; 10 a second from now on.
    assert view.samples == pytest.approx(14 + 22 + 10)
    assert view.ends_at == pytest.approx(102 + (110 - 46) / 10)
    assert view.quorum == 2


def test_who_is_behind_or_in_another_chain_does_not_count() -> None:
    other = next_chain(NO_CHAIN, b"x")
    own = report(0)
    behind, lost = report(1, step=2), report(2, chain=other, trained=200.0)
    view = forecast(own, [behind, lost], target=100, now=100.0)
    assert view.peers == (own,)
    assert view.leader is None
    for ahead in (report(3, step=4, chain=other), report(3, chain=other, trained=301.0)):
        assert forecast(own, [behind, ahead], target=100, now=100.0).leader == ahead


def test_nobody_gathers_no_end_and_a_full_batch_is_over() -> None:
    idle = report(0, rate=0.0)
    assert forecast(idle, [], target=100, now=100.0).ends_at == math.inf
    assert forecast(idle, [], target=5, now=100.0).ends_at == 100.0
    assert forecast(report(0), [report(1, role=Role.AUXILIARY, samples=0.0)], target=14, now=102.0).quorum == 1


def test_a_report_comes_back_as_it_was_and_strangers_are_passed_over() -> None:
    sent = report(1, role=Role.CLIENT, address=None)
    assert parse_report_untrusted(report_to_wire(sent), IDS[1]) == sent
    wire = report_to_wire(sent)
    values = [wire, [*wire[:-1], math.inf], None, report_to_wire(replace(sent, at=1e9))]
    record = [Found(IDS[number], "", value, 200.0) for number, value in enumerate(values, start=1)]
    assert reports_in_untrusted(record, now=100.0) == [sent]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, "host", "both host and port or neither"),
        (2, "node", "a client has no address"),
        (3, -1, "the step of a report must be an integer"),
        (4, b"short", "the chain of a report must be 8 bytes"),
        (5, math.nan, "the samples of a report must be"),
        (6, 1e30, "the rate of a report must be"),
    ],
)
def test_a_report_that_is_none_is_refused(place: int, value: object, message: str) -> None:
    wire = list(report_to_wire(report(1, role=Role.CLIENT, address=None)))
    wire[place] = value
    with pytest.raises(RemoteProtocolError, match=message):
        parse_report_untrusted(wire, IDS[1])


def test_pace_follows_a_change_of_speed() -> None:
    pace = Pace()
    assert pace.rate == 0
    assert pace.seconds_for(10) == 0
    pace.measured(10, 1.0)
    assert pace.rate == pytest.approx(10.0)
    pace.measured(10, 3.0)
    assert pace.rate == pytest.approx(10 / 1.4)  # (0.8 * 10 + 0.2 * 10) / (0.8 * 1 + 0.2 * 3)
    with pytest.raises(ValueError, match="must not be negative"):
        pace.measured(1, -1.0)
