"""The figure of a run, whole and with parts missing, and the numbers behind it."""

import functools
import itertools
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from dmoe_jax.runs.figure import draw_run, load_rows, new_calls, training_figure
from dmoe_jax.runs.style import spread
from dmoe_jax.training.balance import balance
from dmoe_jax.training.engine import Totals
from tests.dmoe_jax.figure_texts import assert_readable, words_of

Record = dict[str, Any]


def run_metrics(*, kill_step: int | None = 100, num_steps: int = 200, grid: int = 4) -> list[Record]:
    """A made-up run: two layers of grid x grid experts on four nodes, one of which may be killed."""
    rng = random.Random(0)
    uids = [f"layer{layer}.{i}.{j}" for layer in range(2) for i in range(grid) for j in range(grid)]
    peer = {uid: f"127.0.0.1:{4000 + index % 4}" for index, uid in enumerate(uids)}
    load = dict.fromkeys(uids, 0)
    metrics: list[Record] = [{"kind": "baseline", "unigram_perplexity": 965.09}]
    ok = failed = 0
    for step in range(1, num_steps + 1):
        time_s, is_dead = 0.5 * step, kill_step is not None and step > kill_step
        loss = 5.9 + 4.5 * math.exp(-step / 40)
        metrics.append({"kind": "train", "step": step, "trainer": 0, "loss": loss, "items": 256, "time_s": time_s})
        for uid in uids:
            load[uid] += rng.randrange(3) * (not is_dead or peer[uid] != "127.0.0.1:4003")
        ok, failed = ok + 30, failed + (is_dead and step < 120)
        if step % 10 == 0:
            metrics.append({"kind": "calls", "step": step, "time_s": time_s, "ok": ok, "failed": int(failed)})
            metrics.append({"kind": "experts", "step": step, "load": dict(load), "peer": dict(peer)})
        if step % 40 == 0:
            perplexity = math.exp(loss + 0.02)
            metrics.append({"kind": "eval", "step": step, "perplexity": perplexity, "time_s": time_s, "split": "valid"})
        if step == kill_step:
            kill: Record = {"kind": "event", "name": "node_killed", "step": step, "time_s": time_s}
            metrics.append(kill | {"detail": "node3 at 127.0.0.1:4003", "peer": "127.0.0.1:4003"})
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
    load = {f"layer{layer}.{i}.{j}": layer + 3 * i + j for layer in range(16) for i in range(4) for j in range(4)}
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
    times, ok, failed = new_calls(metrics)
    np.testing.assert_array_equal(times, [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(ok, [4, 6, 0, 5])
    np.testing.assert_array_equal(failed, [1, 0, 0, 2])
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
    loads = load_rows(metrics)
    assert loads.labels == ("a before", "a after")
    assert loads.columns == ("1", "2", "10")
    np.testing.assert_array_equal(loads.counts, [[3, 1, 0], [7, 0, 4]])
    np.testing.assert_array_equal(loads.killed, [[False, False, False], [False, True, False]])
    whole = load_rows(without(metrics, "event"))
    assert whole.labels == ("a",)
    np.testing.assert_array_equal(whole.counts, [[10, 1, 4]])
    assert not whole.killed.any()


def test_labels_are_spread() -> None:
    """Labels that are too near move up, those beyond an end of the axes push the others; where there is room for all,
    they stay between the ends."""
    assert spread([0.1, 0.5, 0.9], 0.1, 0.0, 1.0) == pytest.approx([0.1, 0.5, 0.9])
    assert spread([0.5, 0.5, 0.58], 0.1, 0.0, 1.0) == pytest.approx([0.5, 0.6, 0.7])
    assert spread([-0.2, 0.0, 0.5], 0.2, 0.0, 1.0) == pytest.approx([0.0, 0.2, 0.5])
    assert spread([0.1, 1.0, 1.0], 0.2, 0.0, 1.0) == pytest.approx([0.1, 0.8, 1.0])
    assert spread([], 0.1, 0.0, 1.0) == []
