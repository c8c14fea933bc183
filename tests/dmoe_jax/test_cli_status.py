"""The tables of `dmoe status`: rates, silence, who compiles and who waits."""

import io
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from dmoe_jax.cli.status import Statuses, status_tables
from dmoe_jax.directory.members import Member
from dmoe_net.identity import Address, Contact, PeerId


def member(index: int, role: str, *, listens: bool = True, **facts: Any) -> Member:
    peer_id = PeerId(bytes([index]) * 32)
    contact = Contact(peer_id, Address("127.0.0.1", 1000 + index)) if listens else None
    return Member(peer_id=peer_id, contact=contact, info={"role": role, **facts}, left_s=30.0)


def tables(members: Sequence[Member], before: Statuses, now: Statuses) -> str:
    """Text that the terminal shows, in 80 columns."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(status_tables("test", members, before, now))
    return console.export_text()


def test_status_shows_rates_silence_and_who_compiles() -> None:
    """Rates are differences over the node's own time, busy never above all of it; silence is said, not left out."""

    def counters(calls: int, uptime_s: float, busy_s: float) -> dict[str, Any]:
        times = {"busy_s": busy_s, "uptime_s": uptime_s, "waiting_rows": 7}
        return {"forward": calls, "backward": calls, "updates": {"a.0": 3, "a.1": 4}} | times

    nodes = [member(index, "node", state="serving", experts=2) for index in range(3)]
    nodes.append(member(3, "node", state="compiling 3 of 8", experts=4))
    first, second = (each.peer_id for each in nodes[:2])
    of_updates = {"steps": 3, "staleness": 1.0}, {"steps": 1, "staleness": 7.0}
    before = {first: counters(10, 60.0, 1.0), second: counters(10, 60.0, 0.0)}
    now = {first: counters(15, 62.0, 2.0) | of_updates[0], second: counters(10, 62.0, 2.5) | of_updates[1]}
    text = tables(nodes, before, now)
    # Three updates of staleness 1, and one of 7.
    assert "swarm 'test': 4 nodes, 10 experts, mean staleness 2.5" in text
    assert "staleness" not in tables(nodes, {}, before)
    # (15 - 10) forward and as many backward calls in two seconds; one second of work in two.
    assert re.search(r"00000000 +127\.0\.0\.1:1000 +2 +5\.0 +7 +50 % +7 +up 62 s", text)
    # A batch of 2.5 s that ended within these two seconds.
    assert re.search(r"01010101 +127\.0\.0\.1:1001 +2 +0\.0 +7 +100 % +7 +up 62 s", text)
    assert re.search(r"02020202 +127\.0\.0\.1:1002 +2 +no answer", text)
    assert re.search(r"03030303 +127\.0\.0\.1:1003 +4 +compiling 3 of 8", text)


def test_status_shows_trainers_averagers_and_auxiliaries() -> None:
    """Those that listen nowhere, too, and those that leave a figure out; a slip of the pen is no empty table."""
    assert "No node or trainer is listed under the name 'test' yet" in tables([], {}, {})
    trainer = member(1, "trainer", listens=False, state="training", step=40, loss=6.0625, items_per_s=1234.5)
    balanced = member(3, "trainer", state="training", step=9, failed_calls=2, load_entropy=0.98765, bias_range=1.25)
    beginner = member(2, "trainer", state="waiting", step=0, failed_calls=0)
    averager = member(1, "averager", group="trunk", averages=4)
    auxiliary = member(4, "auxiliary", group="trunk", averages=7, moved_mb=1234.5, state="assisting")
    text = tables([trainer, beginner, balanced, averager, auxiliary], {}, {})
    assert re.search(r"01010101 +- +40 +6\.062 +1,23[45] +training", text)
    assert re.search(r"02020202 +127\.0\.0\.1:1002 +0 +0 +waiting", text)
    assert re.search(r"03030303 +127\.0\.0\.1:1003 +9 +2 +0\.9877 +1\.25 +training", text)
    assert re.search(r"01010101 +127\.0\.0\.1:1001 +trunk +4", text)
    assert re.search(r"04040404 +127\.0\.0\.1:1004 +trunk +7 +1,23[45] +assisting", text)


def test_status_shows_claims() -> None:
    """A row for each node that claims, and no table where none does; what a stranger's node says is no mistake."""
    nodes = [member(index, "node", state="serving", experts=2) for index in range(3)]
    counts = {"room": 62, "won": 3, "lost": 5, "failed": 6, "given_up": 7}
    claims = counts | {"adopted": {"replica": 4, "checkpoint": 8, "seed": 9}}
    counters = {"updates": {"a.0": 3, "a.1": 4}, "uptime_s": 1.0}
    now = {node.peer_id: counters for node in nodes}
    assert "may claim" not in tables(nodes, {}, now)
    now[nodes[1].peer_id] = counters | {"claims": claims}
    now[nodes[2].peer_id] = counters | {"claims": {"room": 1, "adopted": 3}}
    text = tables(nodes, {}, now)
    assert re.search(r"node +may claim +won +lost +failed +given up +replica +checkpoint +seed", text)
    assert re.search(r"01010101 +62 +3 +5 +6 +7 +4 +8 +9", text)
    assert re.search(r"02020202 +1 +\? +\? +\? +\? +0 +0 +0", text)


def test_status_shows_who_shares_experts_and_why_averages_failed() -> None:
    """In a table of their own, which is not there without them."""
    nodes = [member(1, "node", state="serving", averages=40, averages_failed=3), member(2, "node")]
    now = {nodes[0].peer_id: {"replicas": {"failed": {"not finite": 3}}}}
    text = tables(nodes, {}, now)
    assert re.search(r"01010101 +127\.0\.0\.1:1001 +40 +3 +not finite: 3", text)
    assert re.search(r"01010101 +127\.0\.0\.1:1001 +40 +3 *\n", tables(nodes, {}, {}))
    assert "share experts" not in tables(nodes[1:], {}, {})
