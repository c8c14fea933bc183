"""The averaging table: near the paper's, exact and theoretical cases, the methods by hand, and the command."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import run_experiment
from experiments.moshpit_averaging import settings
from experiments.moshpit_averaging.measurement import (
    mean_rounds,
    missed_bars,
    published_push_sum_round,
    random_groups_round,
    simulate,
)
from experiments.moshpit_averaging.paper import SQUARE, TABLE, TITLES, Setting, paper_rounds
from experiments.moshpit_averaging.settings import AveragingSettings

KEY = jax.random.key(0)


@pytest.mark.slow
def test_groups_that_skip_need_the_rounds_of_the_first_simulator() -> None:
    """17.1 rounds among 1024 peers of whom one in a hundred is absent: three times those that exclude."""
    row = TABLE[-1]
    assert paper_rounds(row) == {"moshpit": (17.1, None)}
    found = mean_rounds(simulate(row, restarts=40, rounds=30, seed=0)["moshpit"])
    assert found["rounds_to_1e-9"] == pytest.approx(17.1, abs=1)


def test_mean_rounds() -> None:
    """The first round at or below a target, 0 where nothing is to be done, all rounds where it is never reached."""
    variances = np.array([[1.0, 1e-4, 1e-9, 1e-3], [1e-4, 1, 1, 1], [1, 1, 1, 1]])
    assert mean_rounds(variances) == {"rounds_to_1e-9": (2 + 3 + 3) / 3, "rounds_to_1e-4": (1 + 0 + 3) / 3}


def test_what_is_off_is_named() -> None:
    """More than half a round from the paper, either way, under the published rule."""
    row = Setting(num_peers=512, grid=SQUARE, failure=0.0)
    assert paper_rounds(row)["moshpit"] == (8.2, 3.6)
    rounds: Any = {
        "random_groups": {"rounds_to_1e-9": 6.1, "rounds_to_1e-4": 2.4},
        "moshpit": {"rounds_to_1e-9": 8.8, "rounds_to_1e-4": 3.6},
    }
    assert missed_bars(row, rounds) == [
        "Random groups to 1e-4, 512 peers on 32^2, p = 0: 2.40, paper 3",
        "Moshpit to 1e-9, 512 peers on 32^2, p = 0: 8.80, paper 8.2",
    ]


@pytest.mark.parametrize("num_peers", [5, 23])
def test_published_push_sum_is_the_published_one(num_peers: int) -> None:
    """Against its matrices, written out: halves on the diagonal, and shifted along the flattened matrix."""
    values = np.random.default_rng(0).normal(size=num_peers).astype(np.float32)
    alive = np.random.default_rng(1).random(num_peers) > 0.2
    assert not alive.all()
    hops = int(np.log2(num_peers - 1))
    for number in range(4):
        hop = 2 ** ((number + 1) % hops)
        diagonal = np.diag(np.full(num_peers, 0.5))
        matrix = diagonal + np.roll(diagonal, hop) + np.roll(diagonal, 2 * hop)
        matrix = matrix * alive * alive[:, None]
        sums = np.maximum(matrix.sum(axis=1), 1e-9)
        expected = np.where(alive, matrix @ values / sums, values)
        found = published_push_sum_round(jnp.asarray(values), jnp.asarray(alive), number)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_random_groups_split_those_who_are_there() -> None:
    """22 present peers in groups of 5: four groups, the two left over join two of them; absent peers keep theirs. Where
    groups skip, the one of five with an absent peer keeps its values."""
    values, alive = jnp.arange(25.0), jnp.arange(25) >= 3
    found = random_groups_round(values, alive, key=KEY, group_size=5)
    np.testing.assert_array_equal(found[:3], values[:3])
    _, sizes = np.unique(np.asarray(found[3:]).round(4), return_counts=True)
    assert sorted(sizes) == [5, 5, 6, 6]
    assert float(found.sum()) == pytest.approx(float(values.sum()), rel=1e-6)
    other = random_groups_round(values, alive, key=jax.random.key(1), group_size=5)
    assert not np.allclose(other, found)
    found = random_groups_round(values, jnp.arange(25) != 7, key=KEY, group_size=5, failure_rule="group_skips")
    assert int((found == values).sum()) == 5


@pytest.mark.slow
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON on the last line with the keys that the report reads, and everything in the folder."""
    monkeypatch.setattr(settings, "TABLE", TABLE[:1])
    run_experiment(AveragingSettings, args=["--quick", "--json", "--out", str(tmp_path / "run")])
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = headline["table"]
    assert (row["peers"], row["grid"], row["failure"], row["failure_rule"]) == (512, [32, 2], 0.0, "exclude")
    assert set(row["methods"]) == set(TITLES)
    assert row["methods"]["all_reduce"]["rounds_to_1e-9"] == 1
    assert headline["mixing_ratio"] == pytest.approx(1, abs=0.05)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.json", "metrics.jsonl", "figure.png", "report.md"} <= names
    assert "Random groups" in (tmp_path / "run" / "report.md").read_text()
