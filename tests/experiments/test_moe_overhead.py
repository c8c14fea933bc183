"""The price of a mixture: what it is measured against has its FLOPs, and the figures are counted right."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from dmoe_jax.models.trunk import StepKeys
from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run
from experiments.moe_overhead import measurement, one_layer
from experiments.moe_overhead.__main__ import main
from experiments.moe_overhead.settings import OverheadSettings
from experiments.moe_overhead.wide_layer import WideLayer
from experiments.transformer_xl.flops import layer_flops
from experiments.transformer_xl.presets import PRESETS, model_config
from experiments.transformer_xl.setup import Setup
from tests.experiments.small_runs import small_preset


def test_flops_of_a_layer_by_hand() -> None:
    """2 positions, 3 memory slots, so 5 keys; width 4, one head of 6, 7 units: each product counted on its own."""
    products = [
        2 * 4 * 6,  # q
        5 * 4 * 6,  # k
        5 * 4 * 6,  # v
        2 * 5 * 6,  # scores by content
        2 * 5 * 6,  # scores by distance
        2 * 5 * 6,  # weighted sum
        2 * 6 * 4,  # output
        2 * 4 * 7,  # feed-forward, in
        2 * 7 * 4,  # and out
    ]
    found = layer_flops(seq_len=2, mem_len=3, d_model=4, num_heads=1, d_head=6, d_ff=7)
    assert found == 2 * sum(products)


def test_the_wide_layer_is_a_transformer_xl_layer() -> None:
    """With the sizes of an expert and its parameters it computes what the expert computes."""
    config = model_config(small_preset("dmoe"), 60)
    expert, layer = config.expert(), WideLayer(num_heads=2, d_head=8, d_ff=24, compute_dtype="float32")
    params = expert.init(jax.random.key(0))
    hidden, memory = (jax.random.normal(jax.random.key(n), (3, 6, 16)) for n in (1, 2))
    mask = jnp.arange(6)[None] >= jnp.array([[0], [3], [6]])
    expected = expert.apply(params, hidden, memory, mask)
    np.testing.assert_allclose(layer.apply({"params": params}, hidden, memory, mask), expected, atol=1e-5)


def test_the_ratio_is_the_median_over_rounds(tmp_path: Path) -> None:
    """Ratios 1.5, 2 and 1; one round that something else disturbed does not count."""
    run = Run(settings=OverheadSettings(), folder=RunFolder.create(tmp_path, {}), console=Console(quiet=True))
    assert measurement.summarise(run) is None
    sizes = {"tokens_per_step": 100, "dense_flops": 8, "moe_flops": 8}
    for dense_s, moe_s in ((0.1, 0.15), (0.1, 0.2), (0.4, 0.4)):
        run.log("round", dense_s=dense_s, moe_s=moe_s, ratio=moe_s / dense_s, **sizes)
        run.log("grid", ratio=moe_s / dense_s + 1)
    run.log("memory", ratio=1.25)
    result = measurement.summarise(run)
    assert result is not None
    assert (result.figures["local_grid_cost"], result.figures["token_memory"]) == (pytest.approx(2.5), 1.25)
    assert result.missed_bars == ["moe_overhead", "local_grid_cost"]
    assert result.figures["moe_overhead"] == pytest.approx(1.5)
    assert result.figures["dense_tokens_per_s"] == pytest.approx(1000)
    assert result.figures["moe_tokens_per_s"] == pytest.approx(500)


@pytest.mark.slow
def test_memory_of_more_rows_stays_below_its_bar() -> None:
    """At most twice as much for four times the rows; both hold the gradients of 64 experts of 100 thousand numbers."""
    few, many = map(one_layer.peak_bytes, one_layer.TOKENS)
    assert 64 * 100_000 * 4 < few < many <= 2 * few


@pytest.mark.slow
def test_the_command_measures_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both models take turns, equal FLOPs are reported, and the folder has its figure."""
    monkeypatch.setitem(PRESETS, ("dmoe", "tiny"), small_preset("dmoe", num_layers=1, layer={"dropout": 0.5}))
    monkeypatch.setattr(measurement, "VOCAB_SIZE", 60)
    asked: list[int] = []

    def noted(setup: Setup, *, trainer: int, step: int) -> StepKeys:
        asked.append(step)
        return step_keys(setup, trainer=trainer, step=step)

    step_keys = Setup.step_keys
    monkeypatch.setattr(Setup, "step_keys", noted)
    main(["--rounds", "2", "--steps-per-round", "3", "--json", "--out", str(tmp_path / "run")])
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert headline["moe_overhead"] > 0
    assert headline["local_grid_cost"] > 0
    assert headline["moe_layer_flops_per_sequence"] == headline["dense_layer_flops_per_sequence"]
    assert set(headline["missed_bars"]) <= {"moe_overhead", "local_grid_cost"}  # those of time
    assert asked == list(range(2 + 2 * 3))  # two to compile, then three in each round
    assert {"figure.png", "report.md"} <= {path.name for path in (tmp_path / "run").iterdir()}
