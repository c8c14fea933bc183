"""The record of who does not answer: no trio, time is a number."""

import pytest

from dmoe_net import peer_health
from dmoe_net.peer_health import LATE_LIMIT, Pause, PeerHealth

PAUSE = Pause(first_s=5.0, longest_s=60.0)


def test_the_pause_doubles_up_to_its_longest() -> None:
    """5, 10, 20, 40, then 60 s; with one failure forgiven the same one later; an answer clears all."""
    health, lenient = PeerHealth(), Pause(first_s=5.0, longest_s=60.0, forgiven=1)
    now = 1.0
    for pause_s, after_one in ((5.0, 0.0), (10.0, 5.0), (20.0, 10.0), (40.0, 20.0), (60.0, 40.0), (60.0, 60.0)):
        health.failed("peer", now)
        assert health.blocks("peer", now + pause_s - 0.01, PAUSE)
        assert not health.blocks("peer", now + pause_s, PAUSE)
        assert health.blocks("peer", now + max(0.0, after_one - 0.01), lenient) == (after_one > 0)
        assert not health.blocks("peer", now + after_one, lenient)
        now += pause_s
    health.succeeded("peer")
    assert not health.blocks("peer", now, PAUSE)
    assert Pause(first_s=5.0, longest_s=60.0).after(10_000) == 60.0
    assert Pause(first_s=0.0, longest_s=0.0).after(3) == 0.0


def test_the_reason_of_the_last_failure_is_told() -> None:
    """With how often and for how long; nothing is told of who may be tried."""
    health = PeerHealth()
    assert health.why_not("peer", 0.0, PAUSE) is None
    health.failed("peer", 1.0, "refused")
    health.failed("peer", 2.0, "silent")
    assert health.why_not("peer", 4.5, PAUSE) == "silent (2 times in a row; not tried for 7.5 s)"
    assert health.why_not("other", 4.5, PAUSE) is None


def test_what_fails_together_fails_once() -> None:
    """Failures within `together_s` of the last that counted are one with it; the next one counts."""
    health = PeerHealth()
    for now in (10.0, 11.0, 12.9):
        health.failed("peer", now, together_s=3.0)
    assert not health.blocks("peer", 15.0, PAUSE)
    health.failed("peer", 13.0, together_s=3.0)
    assert health.blocks("peer", 22.9, PAUSE)


def test_late_answers_in_a_row_are_a_failure() -> None:
    """The third is; an answer in between starts the count anew."""
    health = PeerHealth()
    for _ in range(LATE_LIMIT - 1):
        health.late("expert", 1.0)
    health.succeeded("expert")
    for _ in range(LATE_LIMIT - 1):
        health.late("expert", 1.0)
    assert not health.blocks("expert", 1.0, PAUSE)
    health.late("expert", 1.0)
    assert health.blocks("expert", 5.9, PAUSE)
    assert "late 3 times" in str(health.why_not("expert", 1.0, PAUSE))


def test_the_record_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its size the target that failed longest ago is forgotten."""
    monkeypatch.setattr(peer_health, "MAX_TARGETS", 2)
    health = PeerHealth()
    for number in (1, 2, 1, 3):
        health.failed(number, float(number))
    assert health.blocked(3.0, PAUSE) == (1, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"first_s": -1.0, "longest_s": 1.0},
        {"first_s": 2.0, "longest_s": 1.0},
        {"first_s": 1.0, "longest_s": 1.0, "forgiven": -1},
    ],
)
def test_impossible_pauses_are_refused(options: dict[str, float]) -> None:
    """Negative ones, and a longest one that is shorter than the first."""
    with pytest.raises(ValueError, match="expected 0 <= first_s"):
        Pause(**options)  # type: ignore[arg-type]
