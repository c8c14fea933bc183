"""The state of a swarm for the live page: figures, rates, groups, news, and what strangers say."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmoe_jax.directory.members import Member
from dmoe_jax.live.events import changes
from dmoe_jax.live.snapshot import MAX_EXPERTS, MAX_NEWS, MAX_PEERS, Reading, number_untrusted, snapshot
from dmoe_net.identity import Address, Contact, PeerId
from tests.dmoe_jax.merge_patch import merged


def member(index: int, role: str = "node", *, listens: bool = True, **facts: Any) -> Member:
    peer_id = PeerId(index.to_bytes(2) * 16)
    contact = Contact(peer_id, Address("127.0.0.1", 1000 + index)) if listens else None
    return Member(peer_id=peer_id, contact=contact, info={"role": role, **facts}, left_s=30.0)


def reading(*members: Member, time_s: float = 0.0, **statuses: Any) -> Reading:
    """A reading; statuses by "n" and the member's number."""
    by_id = {member(int(name[1:])).peer_id: status for name, status in statuses.items()}
    return Reading(time_s=time_s, members=members, statuses=by_id)


def key(index: int, role: str = "node") -> str:
    return f"{index:04x}" * 4 + f"/{role}"


def test_a_swarm_is_summed_up() -> None:
    """Rates are differences over the node's own time; one that is silent says so; bytes of a peer count once."""
    node, silent = member(1, state="serving", experts=2, sent_mb=1.5), member(2, state="serving")
    trainers = [member(3, "trainer", step=7, loss=2.0, items_per_s=10.0, failed_calls=1, sent_mb=2.0)]
    trainers.append(member(4, "trainer", listens=False, step=9, loss=4.0, items_per_s=5.0, failed_calls=2))
    averager = member(3, "averager", sent_mb=2.0)
    first = {"forward": 10, "backward": 10, "uptime_s": 60.0, "busy_s": 1.0, "updates": {"a.0": 3, "a.1": 4}}
    second = first | {"forward": 15, "backward": 15, "uptime_s": 62.0, "busy_s": 2.0, "updates": {"a.0": 9, "a.1": 4}}
    more = {"steps": 4, "staleness": 2.5, "waiting_rows": 7}
    everybody = (node, silent, *trainers, averager)
    now = snapshot(reading(*everybody, time_s=2.0, n1=second | more), reading(*everybody, n1=first))
    assert now["totals"] == {
        **{"peers": 4, "nodes": 2, "trainers": 2, "experts": 2, "step": 9, "loss": 3.0, "items_per_s": 15.0},
        **{"failed_calls": 3, "calls_per_s": 5.0, "waiting_rows": 7, "staleness": 2.5, "sent_mb": 3.5},
    }
    assert now["peers"][key(1)]["experts"] == {"a.0": [9, 3.0], "a.1": [4, 0.0]}
    assert now["peers"][key(1)]["address"] == "127.0.0.1:1001"
    assert now["peers"][key(1)]["facts"].items() >= {"busy": 0.5, "calls_per_s": 5.0, "waiting_rows": 7}.items()
    assert now["peers"][key(2)]["state"] == "no answer"
    assert "address" not in now["peers"][key(4, "trainer")]
    assert now["news"] == []


def test_a_node_that_began_anew_has_no_rates() -> None:
    """Neither has the first reading; counters that fall are no negative load."""
    status = {"forward": 10, "backward": 0, "uptime_s": 60.0, "updates": {"a.0": 3}}
    for before in (None, reading(member(1), n1=status | {"uptime_s": 90.0, "updates": {"a.0": 30}})):
        state = snapshot(reading(member(1), n1=status), before)
        assert state["peers"][key(1)]["experts"] == {"a.0": [3, 0.0]}
        assert state["totals"]["calls_per_s"] == 0


def test_groups_are_those_who_met_and_collaborations() -> None:
    """Peers with the same mark are one group, whatever their role."""
    met = {"met": "0badcafe", "met_peers": 3, "averages": 5}
    members = [member(1, "trainer", **met), member(2, "averager", group="trunk", **met | {"averages": 6})]
    members += [member(3, "averager", group="trunk", averages=0)]
    members += [member(index, "collaborator", group="big", gathered=10 * index, target=100) for index in (4, 5)]
    groups = snapshot(reading(*members))["groups"]
    assert groups["group 0badcafe"] == {"peers": 3, "seen": "00010001 00020002", "averages": 6}
    assert groups["collaboration big"] == {"peers": 0, "seen": "00040004 00050005", "gathered": 50, "target": 100}
    assert len(groups) == 2
    crowd = snapshot(reading(*[member(index, "averager", met="x") for index in range(500)]))["groups"]
    assert len(crowd["group x"]["seen"]) < 80


def test_news_tell_who_came_and_went() -> None:
    """One by one if they are few, else their number; the last lines are kept."""
    few, many = [member(1), member(2, "trainer")], [member(index) for index in range(10, 20)]
    state = snapshot(reading(*few, time_s=2.0), reading(member(3)))
    texts = ["node 00010001 joined", "trainer 00020002 joined", "node 00030003 left"]
    assert state["news"] == [[2.0, text] for text in texts]
    later = snapshot(reading(*few, *many, time_s=4.0), reading(*few), state["news"])
    assert later["news"][-1] == [4.0, "10 nodes joined"]
    assert len(snapshot(reading(*few), reading(), [[0.0, "old"]] * 50)["news"]) == MAX_NEWS


STRANGE: list[Any] = [None, True, "<script>", [1], {"a": 1}, math.nan, math.inf, -math.inf, 2**60, -(10.0**300)]


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_numbers_of_strangers_are_numbers(value: Any) -> None:
    """Whatever else a node says where a counter should be is left out, wherever it stands."""
    assert number_untrusted(value) is None
    names = ("forward", "backward", "busy_s", "uptime_s", "updates", "steps", "staleness", "waiting_rows", "devices")
    status = dict.fromkeys(names, value)
    good = {"forward": 1, "uptime_s": 1.0, "updates": {"a.0": 1}, "steps": 1, "staleness": 1.0}
    for now, before in ((status, good), (good, status), (status, status), (good | {"updates": {"a.0": value}}, good)):
        state = snapshot(reading(member(1, state="serving"), n1=now), reading(member(1), n1=before))
        json.dumps(state, allow_nan=False)
        assert state["totals"]["calls_per_s"] == 0
        assert state["peers"][key(1)].get("experts", {}) in ({}, {"a.0": [1, 0.0]})


def test_names_of_strangers_are_short_and_bounded() -> None:
    """Only uids are experts; of experts, peers and digits there is a most."""
    uids = ["<script>alert(1)</script>", "a", "a.0.x", "a." + "0." * 17 + "0", "a" * 65 + ".0", "a.123456", "__proto__"]
    updates = dict.fromkeys(uids, 1) | {f"a.{index}": 1 for index in range(MAX_EXPERTS + 5)}
    [peer] = snapshot(reading(member(1, loss=1 / 3, note="x"), n1={"updates": updates}))["peers"].values()
    assert len(peer["experts"]) == MAX_EXPERTS - len(uids)
    assert set(peer["experts"]) <= {f"a.{index}" for index in range(MAX_EXPERTS)}
    assert peer["facts"]["loss"] == 0.333333
    state = snapshot(reading(*[member(index) for index in range(MAX_PEERS + 3)]))
    assert len(state["peers"]) == MAX_PEERS
    assert state["totals"]["peers"] == MAX_PEERS + 3


STATES = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.text(max_size=2), inner, max_size=4),
    max_leaves=12,
).filter(lambda value: isinstance(value, dict))


@given(STATES, STATES)
def test_changes_bring_one_state_to_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Through JSON, too; between equal states there are none, and what is patched stays as it was."""
    old = json.loads(json.dumps(before))
    assert merged(before, json.loads(json.dumps(changes(before, after)))) == after
    assert before == old
    assert changes(after, json.loads(json.dumps(after))) == {}


def test_changes_are_those_of_the_rfc() -> None:
    """Examples of RFC 7396, appendix A, without null in a state."""
    for before, patch, after in (
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ):
        assert merged(before, patch) == after
