"""The figure of a run, whole and with parts missing, and the numbers behind it."""

import itertools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from dmoe_jax.runs.figure import columns, draw_run, training_figure
from dmoe_jax.runs.load_map import load_rows
from dmoe_jax.runs.style import spread

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
        metrics.append({"kind": "train", "step": step, "trainer": 0, "loss": loss, "tokens": 256, "time_s": time_s})
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


def texts_of(figure: Figure) -> list[Any]:
    """Every text with something in it, after layout; figures lay out when they are drawn."""
    figure.canvas.draw()
    found = []
    for axes in figure.axes:
        found += [
            axes.title,
            axes._left_title,
            axes._right_title,
            axes.xaxis.label,
            axes.yaxis.label,
            *axes.texts,
        ]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = axis.get_major_ticks()
            found += [tick.label1 for tick in ticks if low - 1e-9 <= tick.get_loc() <= high + 1e-9]
    return [text for text in [*found, *figure.texts] if text.get_text() and text.get_visible()]


CASES = {
    "whole": run_metrics(),
    "no kill": run_metrics(kill_step=None),
    "kill at once": run_metrics(kill_step=3),
    "kill at the end": run_metrics(kill_step=198),
    "no evaluation": without(run_metrics(), "eval", "baseline"),
    "no calls": without(run_metrics(), "calls", "experts"),
    "only evaluations": without(run_metrics(), "train", "calls", "experts"),
    "one step": run_metrics(num_steps=1),
    "wide grid": run_metrics(grid=9),
    "flat": [{"kind": "eval", "step": step, "perplexity": 500.0 + step, "split": "valid"} for step in range(9)],
    "empty": [],
}


@pytest.mark.parametrize("metrics", CASES.values(), ids=CASES.keys())
def test_no_text_overlaps_another_or_leaves_the_figure(metrics: list[Record]) -> None:
    """Whatever is missing, the figure is drawn without a warning and all its words can be read."""
    figure = draw_run(metrics, "A made-up run")
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts_of(figure)]
    assert len(boxes) >= 5
    for text, box in boxes:
        assert min(box.x0, box.y0) >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text
    for (one, box), (other, other_box) in itertools.combinations(boxes, 2):
        assert not box.padded(-1).overlaps(other_box.padded(-1)), f"{one!r} overlaps {other!r}"


def test_figure_says_the_numbers() -> None:
    """Baselines, last perplexities, the kill and the failed calls are written where they are drawn."""
    words = {text.get_text() for text in texts_of(draw_run(CASES["whole"]))}
    # exp(5.9 + 4.5 * exp(-5) + 0.02) = 383.8
    assert {"unigram 965", "0.75 × unigram 724", "validation 384", "node3 killed at step 100"} <= words
    assert {"19 of 6,019 calls", "framed: experts of the killed node", "layer1 after"} <= words
    assert {"no training step and no evaluation yet", "no remote call counted yet"} <= {
        text.get_text() for text in texts_of(draw_run([]))
    }


@pytest.mark.parametrize("name", ["whole", "empty"])
def test_figure_is_a_png(tmp_path: Path, name: str) -> None:
    """The file has PNG's signature and its size in pixels, and nothing else is left in the folder."""
    path = training_figure(CASES[name], tmp_path / "figure.png", title="A made-up run")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (1300, 1196)
    assert [item.name for item in tmp_path.iterdir()] == ["figure.png"]


def test_nulls_are_left_out() -> None:
    """A loss that was not a number is null in the file and no point in the figure."""
    metrics: list[Record] = [
        {"kind": "train", "step": 1, "loss": 2.0},
        {"kind": "train", "step": 2, "loss": None},
        {"kind": "train", "step": 3},
        {"kind": "eval", "step": 4, "loss": 1.0},
    ]
    steps, losses = columns(metrics, "train", "step", "loss")
    np.testing.assert_array_equal(steps, [1])
    np.testing.assert_array_equal(losses, [2.0])
    assert [column.size for column in columns(metrics, "calls", "ok", "failed")] == [0, 0]


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


def test_load_of_layers_with_different_experts() -> None:
    """An expert that a layer does not have is not a number; a node is found by the event's detail too."""
    metrics: list[Record] = [
        {"kind": "event", "name": "node_killed", "step": 1, "detail": "node1 at p:1"},
        {"kind": "experts", "step": 2, "load": {"layer10.0": 1, "layer9.1": 2}, "peer": {"layer10.0": "p:1"}},
    ]
    loads = load_rows(metrics)
    assert loads.labels == ("layer9", "layer10")
    np.testing.assert_array_equal(loads.counts, [[np.nan, 2], [1, np.nan]])
    np.testing.assert_array_equal(loads.killed, [[False, False], [True, False]])


def test_spread_by_hand() -> None:
    """Two labels at one height move by half the gap each; labels apart stay; three share the way."""
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    assert spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert spread([0.5, 0.5, 0.58], 0.1) == pytest.approx([0.5 + 0.08 / 3 - 0.1, 0.5 + 0.08 / 3, 0.5 + 0.08 / 3 + 0.1])
    assert spread([], 0.1) == []


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(0, 1), max_size=8).map(sorted))
def test_spread_properties(heights: list[float]) -> None:
    """Neighbours end at least a gap apart, and the mean height does not move."""
    moved = spread(heights, 0.1)
    assert all(high - low >= 0.1 - 1e-9 for low, high in itertools.pairwise(moved))
    if heights:
        assert np.mean(moved) == pytest.approx(np.mean(heights))
