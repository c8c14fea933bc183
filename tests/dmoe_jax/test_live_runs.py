"""Timelines: of a run's records, while they are written, and of a swarm that is recorded in virtual time."""

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import optax
import pytest
import trio

from dmoe_jax import feedforward, open_swarm, record_swarm
from dmoe_jax.cli import main
from dmoe_jax.live.run_feed import MAX_STATES, GrowingFile, RunFeed, open_folder
from dmoe_jax.live.run_states import RunStates
from dmoe_jax.runs.run_folder import append_metric
from dmoe_net import Constant, HostDown, run, simulate
from tests.dmoe_jax.merge_patch import merged
from tests.dmoe_jax.test_cli_swarm import running


def told(feed: RunFeed) -> list[dict[str, Any]]:
    """The events so far."""
    texts: list[bytes] = []

    async def send(data: bytes) -> None:
        texts.append(data)

    async def follow() -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(feed.timeline.follow, send)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()

    trio.run(follow)
    return [json.loads(each.removeprefix(b"data: ")) for each in b"".join(texts).split(b"\n\n") if each]


def last_state(events: list[dict[str, Any]]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for event in events:
        state = event["state"] if event["what"] == "all" else merged(state, event.get("state", {}))
    return state


def test_records_become_states() -> None:
    """Rates over the time since the last state; load by node; a killed node, averages, evaluations and news."""
    states = RunStates()
    load = {"kind": "experts", "load": {"a.0": 10, "a.1": 20}, "peer": {"a.0": "h:1", "a.1": "h:2"}}
    for record in (
        {"kind": "task", "unit": "tokens"},
        {"kind": "train", "time_s": 2.0, "step": 1, "trainer": 0, "loss": 4.0, "items": 100, "staleness": 1},
        {"kind": "train", "time_s": 4.0, "step": 2, "trainer": 1, "loss": 2.0, "items": 300, "staleness": 2},
        {"kind": "calls", "time_s": 4.0, "ok": 7, "failed": 1},
        load | {"time_s": 4.0},
    ):
        states.take(record)
    time_s, state = states.state()
    assert (time_s, states.unit, states.is_over) == (4.0, "tokens", False)
    assert state["totals"] == {
        **{"peers": 4, "nodes": 2, "trainers": 2, "experts": 2, "step": 2, "loss": 3.8},
        **{"items_per_s": 100.0, "calls_per_s": 2.0, "staleness": 1.5, "failed_calls": 1},
    }
    assert state["peers"]["node h:2"]["experts"] == {"a.1": [20, 5.0]}
    assert state["peers"]["trainer 1"]["facts"] == {"step": 2, "loss": 2.0, "staleness": 2, "tokens": 300}
    for record in (
        load | {"time_s": 6.0, "load": {"a.0": 30, "a.1": 20}},
        {"kind": "event", "name": "node_killed", "peer": "h:2", "detail": "node1 at h:2", "time_s": 6.0},
        {"kind": "average", "time_s": 6.0, "round": 0, "peers": 3, "peers_lost": 1, "sent_bytes": 2e6},
        {"kind": "final_eval", "time_s": 6.0, "loss": 1.0, "perplexity": 2.72},
        {"kind": "headline"},
    ):
        states.take(record)
    _, later = states.state()
    assert states.is_over
    assert later["peers"]["node h:1"]["experts"] == {"a.0": [30, 10.0]}
    assert later["peers"]["node h:2"]["state"] == "killed"
    assert later["groups"]["averages"] == {"averages": 1, "peers": 3, "peers_lost": 1}
    assert later["totals"]["validation_perplexity"] == 2.72
    assert later["totals"]["sent_mb"] == 2.0
    assert later["news"] == [[6.0, "node killed: node1 at h:2"]]
    assert state["peers"]["node h:2"]["state"] == "serving"  # what was given away stays as it was


STRANGE: list[Any] = [None, "x", True, [1], {"a": [1]}, float("nan"), -1]


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_damaged_records_do_no_harm(value: Any) -> None:
    """Whatever stands in their fields, the state remains JSON that a browser reads."""
    kinds = ("task", "train", "calls", "experts", "eval", "average", "global_step", "event", "other", value)
    names = ("time_s", "step", "trainer", "loss", "items", "ok", "failed", "load", "peer", "unit", "name", "detail")
    states = RunStates()
    for kind in kinds:
        states.take({"kind": kind} if isinstance(kind, str) else {})
        states.take({"kind": kind if isinstance(kind, str) else "", **dict.fromkeys(names, value)})
        json.dumps(states.state(), allow_nan=False)


def test_a_running_run_is_followed(tmp_path: Path) -> None:
    """Half a line waits for its end, a line that is none is passed over, another file begins the timeline anew."""
    path = tmp_path / "metrics.jsonl"
    append_metric(path, kind="task", unit="tokens")
    append_metric(path, kind="train", time_s=1.0, step=1, loss=3.0, items=1)
    feed = open_folder(tmp_path)
    assert told(feed)[0].items() >= {"what": "about", "kind": "recorded", "load": "samples", "unit": "tokens"}.items()
    assert last_state(told(feed))["totals"]["step"] == 1
    growing = GrowingFile(path)
    assert len(growing.lines()[0]) == 2
    with path.open("a") as file:
        file.write('nonsense\n{"kind":"train","time_s":2.0,')
    assert growing.lines() == ([b"nonsense"], False)
    feed._take({0: [b"nonsense"]}, is_another=False)
    with path.open("a") as file:
        file.write('"step":5,"loss":NaN}\n')
    lines, is_another = growing.lines()
    assert (len(lines), is_another) == (1, False)
    append_metric(path, kind="headline")
    other = tmp_path / "other"
    other.write_text('{"kind":"train","time_s":9.0,"step":7,"items":1}\n')
    other.replace(path)
    lines, is_another = growing.lines()
    assert (len(lines), is_another) == (1, True)
    feed._take({0: lines}, is_another)
    events = told(feed)
    assert [event["what"] for event in events] == ["about", "changes"]
    assert last_state(events)["totals"]["step"] == 7


def of_process(folder: Path, *records: dict[str, Any]) -> None:
    """Append the records of one trainer process."""
    folder.mkdir(exist_ok=True)
    for record in records:
        append_metric(folder / "metrics.jsonl", **record)


def test_all_processes_of_a_run_are_shown(tmp_path: Path) -> None:
    """Their counts are added up, evaluations are the first one's, and the run ends with the last of them."""
    first, second, third = (tmp_path / name for name in ("run", "run.trainer1", "run.trainer2"))
    (tmp_path / "run.trainer9").mkdir()
    (tmp_path / "running.trainer1").mkdir()
    (tmp_path / "running.trainer1" / "metrics.jsonl").write_text('{"kind": "train", "step": 99}\n')
    load = {"kind": "experts", "time_s": 2.0, "peer": {"a.0": "h:1"}}
    average = {"kind": "average", "time_s": 2.0, "peers": 2, "sent_bytes": 1e6}
    of_process(
        first,
        {"kind": "task", "unit": "tokens"},
        {"kind": "train", "time_s": 1.0, "step": 1, "loss": 4.0, "items": 10},
        {"kind": "calls", "time_s": 2.0, "ok": 6, "failed": 1},
        load | {"load": {"a.0": 10}},
        average,
        {"kind": "eval", "time_s": 2.0, "loss": 3.0},
    )
    of_process(
        second,
        {"kind": "train", "time_s": 2.0, "step": 5, "loss": 2.0, "items": 30},
        {"kind": "calls", "time_s": 2.0, "ok": 2, "failed": 2},
        load | {"load": {"a.0": 4, "a.1": 2}, "peer": {"a.1": "h:2"}},
        average,
        {"kind": "eval", "time_s": 2.0, "loss": 9.0},
        {"kind": "headline"},
    )
    feed = open_folder(first)
    state = last_state(told(feed))
    trainers = {key: peer["facts"] for key, peer in state["peers"].items() if peer["role"] == "trainer"}
    assert trainers == {
        "trainer 0": {"step": 1, "loss": 4.0, "tokens": 10},
        "process 1, trainer 0": {"step": 5, "loss": 2.0, "tokens": 30},
    }
    assert state["totals"].items() >= {"step": 5, "failed_calls": 3, "trainers": 2, "experts": 2}.items()
    assert state["totals"].items() >= {"validation_loss": 3.0, "sent_mb": 2.0}.items()
    assert state["peers"]["node h:1"]["experts"] == {"a.0": [14, 7.0]}
    assert state["peers"]["node h:2"]["experts"] == {"a.1": [2, 1.0]}
    assert state["groups"]["averages"]["averages"] == 1
    assert told(feed)[-1]["what"] != "end"
    of_process(third, {"kind": "train", "time_s": 3.0, "step": 6}, {"kind": "headline"})  # begun later
    of_process(first, {"kind": "headline"})
    feed._take(*feed._look())
    assert last_state(told(feed))["totals"]["trainers"] == 3
    assert told(feed)[-1]["what"] == "end"


def test_a_process_that_goes_on_from_a_checkpoint_begins_all_anew(tmp_path: Path) -> None:
    """Its records were cut and replaced: the others are read again, too."""
    of_process(tmp_path / "run", {"kind": "train", "time_s": 1.0, "step": 1})
    of_process(tmp_path / "run.trainer1", {"kind": "train", "time_s": 1.0, "step": 8})
    feed = open_folder(tmp_path / "run")
    assert last_state(told(feed))["totals"]["step"] == 8
    (tmp_path / "other.jsonl").write_text('{"kind": "train", "time_s": 1.0, "step": 4}\n')
    (tmp_path / "other.jsonl").replace(tmp_path / "run.trainer1" / "metrics.jsonl")
    feed._take(*feed._look())
    state = last_state(told(feed))
    assert (state["totals"]["step"], state["totals"]["trainers"]) == (4, 2)


def test_a_long_run_has_a_bounded_number_of_states(tmp_path: Path) -> None:
    """And ends with its end."""
    lines = [
        json.dumps({"kind": "train", "time_s": t, "step": t, "loss": 1, "items": 1}) for t in range(5 * MAX_STATES)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"kind":"headline"}', ""]))
    events = told(open_folder(tmp_path))
    assert MAX_STATES / 2 < len(events) <= MAX_STATES + 2
    assert events[-1]["what"] == "end"
    assert last_state(events)["totals"]["step"] == 5 * MAX_STATES - 1


def test_a_recording_is_passed_on_without_what_is_none(tmp_path: Path) -> None:
    """Lines that no browser could read are left out."""
    lines = [
        '{"time":0,"what":"about","title":"x","kind":"recorded","load":"updates"}',
        '{"time":0,"what":"all","state":{}}',
    ]
    lines += [
        '{"time":1,"what":"changes","state":{"a":NaN}}',
        "[1]",
        "half",
        '{"time":2,"what":"changes","state":{"a":1}}',
    ]
    path = tmp_path / "watch.jsonl"
    path.write_text("\n".join([*lines, ""]))
    assert [event["time"] for event in told(open_folder(tmp_path))] == [0, 0, 2]
    assert told(open_folder(tmp_path))[0]["title"] == "x"
    with path.open("a") as file:
        file.write('{"time":3,"what":"end"}\n')
    assert told(open_folder(tmp_path))[-1]["what"] == "end"


async def _recorded(folder: Path) -> None:
    """Two simulated nodes, one of which dies; recorded by a trainer that tells a loss."""
    expert, hosts = feedforward(d_model=4), ("node0", "node1")

    async def node(network: Any, host: str, join: Any, started: trio.Event) -> None:
        async with open_swarm(join, network=network, host=host, seed=int(host[-1])) as swarm:
            await swarm.serve({f"ffn.{host[-1]}.[0:2]": expert}, optimizer=optax.sgd(0.1))
            started.set()
            await trio.sleep_forever()

    async with (
        simulate(seed=1, latency=Constant(0.05), schedule=[(40.0, HostDown("node1"))]) as network,
        open_swarm(network=network, host="trainer", seed=7) as swarm,
    ):
        for host in hosts:
            started = trio.Event()
            network.start(host, node, network, host, swarm.contact, started)
            await started.wait()
        async with swarm.announced("trainer", lambda: {"step": 3, "loss": 1.5}), record_swarm(swarm, folder):
            await trio.sleep(120)


def test_a_simulated_swarm_is_recorded_and_repeats(tmp_path: Path) -> None:
    """In virtual time: who is there, who died, what the trainer tells, and the end; the same seed, the same file."""
    for name in ("first", "second"):
        run(partial(_recorded, tmp_path / name), seed=1)
    files = [(tmp_path / name / "watch.jsonl").read_bytes() for name in ("first", "second")]
    assert files[0] == files[1]
    events = told(open_folder(tmp_path / "first"))
    assert [event["what"] for event in events[:2]] == ["about", "all"]
    assert events[-1]["what"] == "end"
    assert 30 <= len(events) <= 70
    early = last_state(events[:8])["totals"]
    assert early.items() >= {"nodes": 2, "trainers": 1, "experts": 4, "step": 3, "loss": 1.5}.items()
    assert early["sent_mb"] > 0
    state = last_state(events)
    assert state["totals"]["nodes"] == 1
    assert any("left" in text for _, text in state["news"])
    with pytest.raises(ValueError, match="is there already"):
        run(partial(_recorded, tmp_path / "first"), seed=1)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_recording_of_the_page_has_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented simulation trains: the page that plays it shows calls, the load of experts, and a node's death."""
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "watch.md").read_text()
    (block,) = (
        text for text in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "record_swarm" in text
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "watch.md", "exec"), {"__name__": "__main__"})
    events = told(open_folder(tmp_path / "runs" / "simulated"))
    states = [last_state(events[:stop]) for stop in range(2, len(events))]
    totals = [state["totals"] for state in states]
    assert max(each.get("calls_per_s", 0) for each in totals) > 10
    assert totals[-1]["step"] > 100
    assert totals[-1]["failed_calls"] > 0
    peers = states[-1]["peers"].values()
    assert sum(count for peer in peers for count, _ in peer.get("experts", {}).values()) > 100
    assert totals[-1]["nodes"] == 3 or any(peer["state"] == "no answer" for peer in peers)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected either RUN, a folder, or --join PEER, a swarm"),
        (["runs/x", "--join", "127.0.0.1:1"], "expected either RUN"),
        (["runs/x", "--port", "70000"], "--port must be 0 to 65535, got 70000"),
        (["nothing"], "nothing is no folder of a run: expected metrics.jsonl or watch.jsonl in it"),
        (["--join", "nonsense"], "--join: "),
    ],
)
def test_mistakes_are_told_in_a_line(words: list[str], message: str, capsys: Any, monkeypatch: Any) -> None:
    """With status 2; the environment's swarm is not asked beside a folder."""
    monkeypatch.setenv("DMOE_JOIN", "127.0.0.1:9") if words == ["nothing"] else monkeypatch.delenv("DMOE_JOIN", False)
    with pytest.raises(SystemExit) as ended:
        main(["watch", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@contextmanager
def watching(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `dmoe watch` process, in the end terminated, and the address that it prints."""
    command = [sys.executable, "-m", "dmoe_jax.cli", "watch", *words]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().removeprefix("watch at ").strip()
        finally:
            process.terminate()
            process.wait(timeout=20)


@pytest.mark.slow
def test_the_command_watches_a_swarm_and_a_folder(tmp_path: Path, capsys: Any) -> None:
    """It prints where, shows the state, refuses a port that is taken, and ends in order."""

    def first_events(url: str, count: int) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{url}events", timeout=20) as answer:
            lines = filter(bytes.strip, answer)
            return [json.loads(next(lines).removeprefix(b"data: ")) for _ in range(count)]

    with (
        running("dht", "--insecure-loopback") as (_, contact),
        watching("--join", contact, "--insecure-loopback", "--swarm", "mine") as (process, url),
    ):
        about, everything = first_events(url, 2)
        assert (about["title"], about["kind"]) == ("swarm 'mine'", "live")
        assert everything["state"]["totals"]["peers"] == 0
        with pytest.raises(SystemExit) as ended:
            main(["watch", str(tmp_path), "--port", url.rstrip("/").rpartition(":")[2]])
        assert ended.value.code == 2  # an empty folder
        process.terminate()
        assert process.wait(timeout=20) == 130
    (tmp_path / "metrics.jsonl").write_text('{"kind":"train","time_s":1.0,"step":4}\n')
    with watching(str(tmp_path)) as (_, url):
        assert first_events(url, 2)[1]["state"]["totals"]["step"] == 4
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["watch", str(tmp_path), "--port", url.rstrip("/").rpartition(":")[2]])
        assert ended.value.code == 75
        assert re.search(r"--port: cannot listen on 127\.0\.0\.1:\d+: .*in use", capsys.readouterr().err)
