"""The folder of a run, never mixed up and never half-written, its figure, its report, and the balance of its load."""

import errno
import functools
import itertools
import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from dmoe_jax.runs.figure import draw_run, load_rows, new_calls, training_figure
from dmoe_jax.runs.report import MAX_EVENTS, ReportTable, final_evaluation, format_value, write_report
from dmoe_jax.runs.run_folder import RunFolder, append_metric, plain, read_metrics, replaced_file
from dmoe_jax.runs.style import spread
from dmoe_jax.training.balance import Balance, balance, mean_balance
from dmoe_jax.training.engine import Totals
from tests.dmoe_jax.figure_texts import assert_readable, words_of


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    router: object = math.sqrt


@dataclass(frozen=True)
class Settings:
    steps: int = 10
    grid: tuple[int, ...] = (4, 4)
    out: Path | None = Path("here")
    inner: Inner = field(default_factory=Inner)


def test_config_says_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings as JSON, the versions of what computes, the machine, the command and the time."""
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python", "-m", "pytest", "a test"])
    folder = RunFolder.create(tmp_path / "a" / "b", Settings())
    config = json.loads((tmp_path / "a" / "b" / "config.json").read_text())
    assert config == folder.config()
    inner = {"rate": 0.5, "router": "sqrt"}
    assert config["settings"] == {"steps": 10, "grid": [4, 4], "out": "here", "inner": inner}
    assert {"python", "jax", "flax", "optax"} <= config["versions"].keys()
    assert {"system", "machine", "cpu_count"} <= config["platform"].keys()
    assert (config["command"], bool(config["started"])) == ("python -m pytest 'a test'", True)


def test_folder_without_a_path_is_named_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that start in the same second get two folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda pattern: "20250102-030405")
    paths = [RunFolder.create(None, {}, name="demo").path for _ in range(3)]
    assert [str(path) for path in paths] == [f"runs/demo-20250102-030405{end}" for end in ("", "-2", "-3")]


def test_folders_are_not_mixed(tmp_path: Path) -> None:
    """A folder that is not empty and a file are refused by name; an empty folder is fine."""
    (tmp_path / "run").mkdir()
    RunFolder.create(tmp_path / "run", {})
    with pytest.raises(ValueError, match=r"run is not empty; expected a new or empty folder"):
        RunFolder.create(tmp_path / "run", {})
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file"):
        RunFolder.create(tmp_path / "file", {}, resume=True)


def test_resume_keeps_the_metrics_and_notes_what_changed(tmp_path: Path) -> None:
    """A line that a killed writer left unfinished is cut off, so that the next one does not continue it."""
    folder = RunFolder.create(tmp_path, Settings())
    folder.log("train", step=1)
    with folder.metrics_path.open("a") as file:
        file.write('{"kind":"train","st')
    assert folder.metrics() == [{"kind": "train", "step": 1}]
    folder.write_text("config.json", json.dumps(folder.config() | {"started": "2026-11-01T10:00:00+0000"}))
    again = RunFolder.create(tmp_path, Settings(steps=20), resume=True)
    again.log("train", step=2)
    train, event, last = again.metrics()
    assert (train["step"], last["step"]) == (1, 2)
    assert event == {"kind": "event", "name": "resumed", "detail": "steps: 10 -> 20"}
    assert again.config()["settings"]["steps"] == 20
    assert again.config()["started"] == "2026-11-01T10:00:00+0000"  # not when it was taken up again
    RunFolder.create(tmp_path, Settings(steps=20), resume=True)
    assert again.metrics()[-1]["detail"] == "with the same settings"


def test_metrics_are_one_json_object_a_line(tmp_path: Path) -> None:
    """Numbers that JSON lacks are null, NumPy's are plain numbers, and line feeds stay inside their line."""
    path = tmp_path / "metrics.jsonl"
    append_metric(path, kind="eval", perplexity=math.nan, best=np.float32(1.5), load={"a.0": np.int64(3)})
    append_metric(path, kind="event", name="two\nlines", parts=(1, -math.inf))
    assert path.read_text().count("\n") == 2
    assert read_metrics(path) == [
        {"kind": "eval", "perplexity": None, "best": 1.5, "load": {"a.0": 3}},
        {"kind": "event", "name": "two\nlines", "parts": [1, None]},
    ]


def test_every_cut_of_the_file_can_be_read(tmp_path: Path) -> None:
    """Wherever a kill cuts the file, the lines before it are there."""
    path = tmp_path / "metrics.jsonl"
    for step in range(3):
        append_metric(path, kind="train", step=step)
    data = path.read_bytes()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        assert [record["step"] for record in read_metrics(path)] == list(range(data[:size].count(b"\n")))


def test_damage_inside_the_file_is_named(tmp_path: Path) -> None:
    """A whole line that is no record is an error with its number, not a silent gap."""
    path = tmp_path / "metrics.jsonl"
    for bad in ("nonsense", "[1]", '{"step": 1}'):
        path.write_text('{"kind":"train"}\n' + bad + '\n{"kind":"train"}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: expected a JSON object"):
            read_metrics(path)


def test_several_writers_do_not_tear_lines(tmp_path: Path) -> None:
    """Four writers at once: every line is whole, none is lost, and each writer's are in order."""
    path = tmp_path / "metrics.jsonl"

    def write(writer: int) -> None:
        for number in range(50):
            append_metric(path, kind="train", writer=writer, number=number, padding="x" * 500)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    records = read_metrics(path)
    for writer in range(4):
        assert [record["number"] for record in records if record["writer"] == writer] == list(range(50))


def test_files_are_replaced_at_once(tmp_path: Path) -> None:
    """If writing fails the old content stays and nothing is left behind."""
    report = tmp_path / "report.md"
    assert RunFolder.create(tmp_path, {}).write_text("report.md", "old") == report
    with pytest.raises(RuntimeError), replaced_file(report) as temporary:  # noqa: PT012
        temporary.write_text("half")
        assert report.read_text() == "old"
        raise RuntimeError
    assert report.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "report.md"]


@pytest.mark.parametrize("names", ["nothing", "the temporary file", "another file"])
def test_a_full_disk_names_the_file_that_was_asked_for(names: str, tmp_path: Path) -> None:
    """And not the one that is written first, of which nobody has heard; an error of another file keeps its name."""
    report = tmp_path / "report.md"
    with pytest.raises(OSError, match="No space left") as caught, replaced_file(report) as temporary:  # noqa: PT012
        temporary.write_text("half")
        named = {"nothing": (), "the temporary file": (str(temporary),), "another file": ("other",)}[names]
        raise OSError(errno.ENOSPC, "No space left on device", *named)
    assert caught.value.filename == ("other" if named == ("other",) else str(report))
    (tmp_path / "folder").mkdir()
    with (
        pytest.raises(IsADirectoryError, match=f"'{tmp_path / 'folder'}'$"),
        replaced_file(tmp_path / "folder") as file,
    ):
        file.write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_plain_values() -> None:
    """Each kind of value that settings hold, by hand."""
    found = {1: (1, 2.5), "set": {"b", "a"}, "none": None, "true": np.bool_(True), "array": np.arange(3)}
    found |= {"inf": np.array(np.inf), "path": Path("a/b"), "class": Settings}
    expected = {"1": [1, 2.5], "set": ["a", "b"], "none": None, "true": True, "array": [0, 1, 2]}
    assert plain(found) == expected | {"inf": None, "path": "a/b", "class": "Settings"}


Record = dict[str, Any]


def run_metrics(*, kill_step: int | None = 100, num_steps: int = 200, grid: int = 4) -> list[Record]:
    """A made-up run: two layers of grid x grid experts on four nodes, one of which may be killed."""
    rng, victim = random.Random(0), "127.0.0.1:4003"
    uids = [f"layer{layer}.{i}.{j}" for layer in range(2) for i in range(grid) for j in range(grid)]
    peer = {uid: f"127.0.0.1:{4000 + index % 4}" for index, uid in enumerate(uids)}
    load, failed = dict.fromkeys(uids, 0), 0
    metrics: list[Record] = [{"kind": "baseline", "unigram_perplexity": 965.09}]
    for step in range(1, num_steps + 1):
        is_dead, loss = kill_step is not None and step > kill_step, 5.9 + 4.5 * math.exp(-step / 40)
        now = {"step": step, "time_s": 0.5 * step}
        metrics.append({"kind": "train", "trainer": 0, "loss": loss, "items": 256, **now})
        for uid in uids:
            load[uid] += rng.randrange(3) * (not is_dead or peer[uid] != victim)
        failed += is_dead and step < 120
        if step % 10 == 0:
            metrics.append({"kind": "calls", "ok": 30 * step, "failed": int(failed), **now})
            metrics.append({"kind": "experts", "step": step, "load": dict(load), "peer": peer})
        if step % 40 == 0:
            metrics.append({"kind": "eval", "perplexity": math.exp(loss + 0.02), "split": "valid", **now})
        if step == kill_step:
            event = {"kind": "event", "name": "node_killed", "detail": f"node3 at {victim}", "peer": victim}
            metrics.append(event | now)
    return metrics


def without(metrics: list[Record], *kinds: str) -> list[Record]:
    return [record for record in metrics if record["kind"] not in kinds]


def balance_metrics(*, layers: int, windows: int = 8, experts: int = 16) -> list[Record]:
    """Records of a load that becomes more even, each layer at its own pace; the first expert of each gets nothing."""
    metrics: list[Record] = []
    for window, layer in itertools.product(range(1, windows + 1), range(layers)):
        load = {f"layer{layer}.{i}": i * (9 - window) + 10 * layer * (i > 0) for i in range(experts)}
        figures = asdict(balance(list(load), Totals(load=load, calls_ok=90, failures={"late": 10}), Totals()))
        metrics.append({"kind": "balance", "step": 25 * window, "layer": f"layer{layer}", **figures})
    return metrics


def many_layers() -> list[Record]:
    """The load of sixteen layers at once."""
    cells = itertools.product(range(16), range(4), range(4))
    load = {f"layer{layer}.{i}.{j}": layer + 3 * i + j for layer, i, j in cells}
    return [*without(run_metrics(), "experts", "event"), {"kind": "experts", "step": 200, "load": load}]


CASES = {
    "whole": run_metrics(),
    "kill at the end": run_metrics(kill_step=198),
    "no evaluation": without(run_metrics(), "eval", "baseline"),
    "only evaluations": without(run_metrics(), "train", "calls", "experts"),
    "one step": run_metrics(num_steps=1),
    "wide grid": run_metrics(grid=9),
    "balance of two layers": run_metrics(kill_step=None) + balance_metrics(layers=2),
    "balance of many layers": many_layers() + balance_metrics(layers=16, experts=64),
    "balance without load": [{"kind": "balance", "step": 5, "layer": "layer0", "cv": None, "entropy": None}],
    "empty": [],
}


@functools.cache
def figure_of(case: str) -> Figure:
    return draw_run(CASES[case], "A made-up run")


@pytest.mark.parametrize("case", CASES)
def test_no_text_overlaps_another_or_leaves_the_figure(case: str) -> None:
    """Whatever is missing, the figure is drawn without a warning and all its words can be read."""
    assert_readable(figure_of(case))


def test_figure_says_the_numbers() -> None:
    """Baselines, last perplexities, the kill and the failed calls are written where they are drawn."""
    words = words_of(figure_of("whole"))
    # exp(5.9 + 4.5 * exp(-5) + 0.02) = 383.8
    assert {"unigram 965", "0.75 × unigram 724", "validation 384", "node3 killed at step 100"} <= words
    assert {"19 of 6,019 calls", "framed: experts of the killed node", "layer1 after"} <= words
    assert {"no training step and no evaluation yet", "no remote call counted yet"} <= words_of(figure_of("empty"))


def test_figure_tells_the_final_perplexity_from_the_curve() -> None:
    """It is over more words than each point, and says over how many."""
    final = {"kind": "final_eval", "step": 200, "split": "valid", "perplexity": 467.8, "items": 16384}
    point = {"kind": "eval", "step": 200, "split": "valid", "perplexity": 433.1, "items": 8192}
    figure = draw_run([{"kind": "task", "unit": "tokens"}, *run_metrics(), point, final], "A made-up run")
    assert_readable(figure)
    assert {"final perplexity, over 16,384 words: 467.8", "validation 433"} <= words_of(figure)


def test_balance_has_a_panel_only_where_it_was_measured() -> None:
    """One panel more, and the figure as much higher; the last window's mean is written beside the line."""
    plain, balanced = figure_of("whole"), figure_of("balance of two layers")
    assert (len(plain.axes), len(balanced.axes)) == (4, 5)
    assert balanced.get_figheight() > plain.get_figheight()
    # Last window: layer0 has 0, 1, ..., 15, layer1 the same + 10 without the first, which is 0 in both.
    shares = [np.array(load) / sum(load) for load in (range(1, 16), range(11, 26))]
    entropies = [-sum(share * np.log(share)) / math.log(16) for share in shares]
    assert f"mean {np.mean(entropies):.2f}" in words_of(balanced)


def test_new_calls_by_hand() -> None:
    """Differences of the cumulative counts in the order of time; a count that falls was begun anew and adds nothing."""
    counts = [(2.0, 10, 1), (1.0, 4, 1), (3.0, 0, 0), (4.0, 5, 2)]
    metrics = [{"kind": "calls", "time_s": time_s, "ok": ok, "failed": failed} for time_s, ok, failed in counts]
    assert [each.tolist() for each in new_calls(metrics)] == [[0, 1, 2, 3, 4], [4, 6, 0, 5], [1, 0, 0, 2]]
    assert [values.size for values in new_calls([])] == [1, 0, 0]


def test_figure_is_a_png(tmp_path: Path) -> None:
    """The file has PNG's signature and its size in pixels, and nothing else is left in the folder."""
    path = training_figure(CASES["whole"], tmp_path / "figure.png", title="A made-up run")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (1300, 1196)
    assert [item.name for item in tmp_path.iterdir()] == ["figure.png"]


def test_load_is_split_at_the_kill() -> None:
    """Counts are cumulative: after = last - at the kill; the record before tells whose experts are lost."""
    metrics: list[Record] = [
        {"kind": "experts", "step": 5, "load": {"a.1": 3, "a.2": 1}, "peer": {"a.1": "p:1", "a.2": "p:2"}},
        {"kind": "event", "name": "node_killed", "step": 7, "peer": "p:2"},
        {"kind": "experts", "step": 9, "load": {"a.1": 10, "a.2": 1, "a.10": 4}, "peer": {"a.1": "p:1"}},
    ]
    loads, whole = load_rows(metrics), load_rows(without(metrics, "event"))
    assert (loads.labels, loads.columns) == (("a before", "a after"), ("1", "2", "10"))
    np.testing.assert_array_equal(loads.counts, [[3, 1, 0], [7, 0, 4]])
    np.testing.assert_array_equal(loads.killed, [[False, False, False], [False, True, False]])
    assert whole.labels == ("a",)
    np.testing.assert_array_equal(whole.counts, [[10, 1, 4]])
    assert not whole.killed.any()


def test_labels_are_spread() -> None:
    """Labels that are too near move up, those beyond an end of the axes push the others; all stay between the ends."""
    assert spread([0.1, 0.5, 0.9], 0.1, 0.0, 1.0) == pytest.approx([0.1, 0.5, 0.9])
    assert spread([0.5, 0.5, 0.58], 0.1, 0.0, 1.0) == pytest.approx([0.5, 0.6, 0.7])
    assert spread([-0.2, 0.0, 0.5], 0.2, 0.0, 1.0) == pytest.approx([0.0, 0.2, 0.5])
    assert spread([0.1, 1.0, 1.0], 0.2, 0.0, 1.0) == pytest.approx([0.1, 0.8, 1.0])
    assert spread([], 0.1, 0.0, 1.0) == []


def test_report_by_hand(tmp_path: Path) -> None:
    """Headline, figure, events, nested settings and the command are all there."""
    folder = RunFolder.create(tmp_path, {"steps": 10, "expert": {"d_ff": 64, "name": "a|b"}})
    folder.log("event", name="node_killed", step=5, time_s=65.4, detail="node3 | gone\nfor good")
    folder.log("event", name="resumed")
    (tmp_path / "figure.png").write_bytes(b"")
    headline = {"final_perplexity": 512.345, "calls": 12345, "learnt": True, "share": None}
    path = write_report(folder, headline, title="Demo", summary="On WikiText-2.", command="just demo --seed 1")
    lines = path.read_text().splitlines()
    assert path == tmp_path / "report.md"
    assert lines[:3] == ["# Demo", "", "On WikiText-2."]
    assert {"| final perplexity | 512.3 |", "| calls | 12,345 |", "| learnt | yes |", "| share | – |"} <= {*lines}
    assert {"| 5 | 1:05 | node killed | node3 \\| gone for good |", "| – | – | resumed |  |"} <= {*lines}
    assert {"| `steps` | 10 |", "| `expert.d_ff` | 64 |", "| `expert.name` | a\\|b |", "just demo --seed 1"} <= {*lines}
    assert sum("](figure.png)" in line for line in lines) == 1


def test_report_of_a_quiet_run(tmp_path: Path) -> None:
    """Without events, figure or command it says so, leaves the figure out, and gives the command that ran."""
    folder = RunFolder.create(tmp_path, {})
    text, config = write_report(folder, {}).read_text(), folder.config()
    for part in ("Nothing out of the ordinary.", config["command"], f"python {config['versions']['python']}"):
        assert part in text
    assert "figure.png" not in text


def test_what_a_run_lost_is_out_of_the_ordinary(tmp_path: Path) -> None:
    """Failed calls with their reasons, samples without experts, missed averages; not what is 0."""
    headline = {
        **{"calls_ok": 1184, "calls_failed": 16, "failures": {"unreachable": 12, "late": 4}},
        **{"samples_without_experts": 3, "averages_missed": 2, "averages_rejected": 0, "failed: no group found": 45},
    }
    text = write_report(RunFolder.create(tmp_path, {}), headline).read_text()
    assert "| – | – | calls failed | 16 of 1,200: unreachable 12, late 4 |" in text
    for name, number in {"samples without experts": 3, "averages missed": 2, "failed: no group found": 45}.items():
        assert f"| – | – | {name} | {number} in all |" in text
    assert "| – | – | averages rejected" not in text
    assert "Nothing out of the ordinary" not in text


def test_the_final_figure_is_told_from_the_curve(tmp_path: Path) -> None:
    """The report has the words that each is over; nothing is said where they are the same."""
    folder = RunFolder.create(tmp_path, {})
    folder.log("task", name="text", unit="tokens")
    folder.log("eval", step=5, split="valid", perplexity=66.5, loss=4.2, items=8192)
    for split, perplexity in (("valid", 73.5), ("test", 80.0)):
        folder.log("final_eval", step=5, split=split, perplexity=perplexity, loss=4.3, items=16384)
    sentence = "The final perplexity, over 16,384 words: 73.5. Each point of the curve is over 8,192 words."
    assert sentence in write_report(folder, {}).read_text()
    assert final_evaluation(folder.metrics()) == ("final perplexity, over 16,384 words: 73.5", "8,192 words")
    folder.log("task", name="text", unit="tokens", meaning="vocabulary: 1,280 pieces, abc")
    assert final_evaluation(folder.metrics()[1:]) == ("final perplexity, over 16,384 pieces: 73.5", "8,192 pieces")
    folder.log("eval", step=5, split="valid", perplexity=73.5, loss=4.3, items=16384)
    assert sentence not in write_report(folder, {}).read_text()


def test_report_is_bounded(tmp_path: Path) -> None:
    """A run of many events gets a table of the first ones and the number of the others."""
    folder = RunFolder.create(tmp_path, {})
    for step in range(MAX_EVENTS + 3):
        folder.log("event", name="lost_step", step=step)
    text = write_report(folder, {}).read_text()
    assert text.count("| lost step |") == MAX_EVENTS
    assert "and 3 more in metrics.jsonl." in text


def test_values_for_readers() -> None:
    """Four significant digits, thousands apart."""
    found = [format_value(value) for value in (0.00012345, 1234.56, 123456.7, 1e20, -20000.0, [4, 4], "as it is")]
    assert found == ["0.0001234", "1,235", "123,457", "1e+20", "-20,000", "4, 4", "as it is"]


def test_tables_follow_the_figure(tmp_path: Path) -> None:
    """Each with its heading and its note; a row of another length is refused at once."""
    folder = RunFolder.create(tmp_path, {})
    tables = [
        ReportTable(title="Routers", head=("router", "perplexity"), rows=[("a|b", 512.345)], note="At the end."),
        ReportTable(title="Nothing", head=("x",), rows=[]),
    ]
    text = write_report(folder, {"calls": 3}, tables=tables).read_text()
    first = "## Routers\n\n| router | perplexity |\n| --- | --- |\n| a\\|b | 512.3 |\n\nAt the end.\n\n"
    assert f"| calls | 3 |\n\n{first}## Nothing\n\n| x |\n| --- |\n\n## What happened" in text
    with pytest.raises(ValueError, match=r"rows of 2 cells, x, y, got \(1,\)"):
        ReportTable(title="Wrong", head=("x", "y"), rows=[(1, 2), (1,)])


UIDS = ("a.0", "a.1", "a.2", "a.3")


def balance_of(samples: list[int] | tuple[int, ...]) -> Balance:
    """Balance of the experts a.0, a.1 ... from the beginning of a run."""
    load = {f"a.{index}": count for index, count in enumerate(samples)}
    return balance(list(load), Totals(load=load), Totals())


@pytest.mark.parametrize(
    ("load", "cv", "entropy", "dead"),
    [
        ((5, 5, 5, 5), 0.0, 1.0, 0),
        # Mean 1, deviations 3, -1, -1, -1: sqrt((9 + 1 + 1 + 1) / 4) = sqrt(3).
        ((4, 0, 0, 0), math.sqrt(3), 0.0, 3),
        # Two of four share everything: log 2 / log 4; deviations are all 1 around the mean 1.
        ((2, 2, 0, 0), 1.0, 0.5, 2),
        # Mean 2, deviations 4, -1, -1, -2: sqrt(22 / 4) / 2; -(3/4 ln 3/4 + 2/8 ln 1/8) / ln 4.
        ((6, 1, 1, 0), math.sqrt(5.5) / 2, -(0.75 * math.log(0.75) + 0.25 * math.log(0.125)) / math.log(4), 1),
    ],
)
def test_balance_by_hand(load: tuple[int, ...], cv: float, entropy: float, dead: int) -> None:
    """Coefficient of variation, normalised entropy and dead experts of small loads."""
    found = balance_of(load)
    assert found.histogram == load
    assert found.cv == pytest.approx(cv)
    assert found.entropy == pytest.approx(entropy)
    assert math.copysign(1.0, found.entropy or 0.0) == 1.0
    assert found.dead == dead


def test_balance_of_a_window() -> None:
    """Only growth counts; experts that were never called count 0, those of other layers not at all."""
    before = Totals(load={"a.0": 10, "a.1": 3}, calls_ok=5, failures={"late": 1})
    totals = Totals(load={"a.0": 10, "a.1": 7, "a.2": 4, "b.0": 99}, calls_ok=11, failures={"late": 2, "timeout": 1})
    found = balance(UIDS, totals, before)
    assert found == Balance(histogram=(0, 4, 4, 0), cv=1.0, entropy=0.5, dead=2, share_lost=0.25)


def test_nothing_happened() -> None:
    """Without a sample or a call there is no figure, and every expert is dead; one alone is always even."""
    totals = Totals(load={"a.0": 5})
    nothing = Balance(histogram=(0, 0, 0, 0), cv=None, entropy=None, dead=4, share_lost=None)
    assert balance(UIDS, totals, totals) == nothing
    assert balance_of([5]) == Balance(histogram=(5,), cv=0.0, entropy=1.0, dead=0, share_lost=None)


def test_mean_by_hand() -> None:
    """The mean of layers leaves out what is not known; dead experts are counted together."""
    even, unknown = balance_of([3, 1]), balance_of([0, 0])
    expected = {"load_cv": 0.5, "load_entropy": even.entropy, "dead_experts": 2, "share_lost": None}
    assert mean_balance([even, unknown]) == pytest.approx(expected)
    assert mean_balance([]) == {"load_cv": None, "load_entropy": None, "dead_experts": 0, "share_lost": None}


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=64).filter(any), st.integers(2, 1000), st.randoms())
def test_balance_of_any_load(samples: list[int], factor: int, rng: random.Random) -> None:
    """Figures stay in their ranges; neither the order of experts nor the number of samples matters, only shares."""
    shuffled = [factor * count for count in samples]
    rng.shuffle(shuffled)
    found, other = balance_of(samples), balance_of(shuffled)
    assert found.cv is not None
    assert found.entropy is not None
    assert 0 <= found.cv <= math.sqrt(len(samples) - 1) * (1 + 1e-12)
    assert 0 <= found.entropy <= 1
    assert found.dead == samples.count(0)
    assert (other.cv, other.entropy) == pytest.approx((found.cv, found.entropy), abs=1e-9)
