"""The price of a mixture: what it is measured against has its FLOPs, and the figures are counted right."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run, run_experiment
from experiments.moe_overhead import measurement
from experiments.moe_overhead.measurement import TOKENS, WideLayer, peak_bytes, summarise
from experiments.moe_overhead.settings import OverheadSettings
from experiments.transformer_xl.flops import layer_flops
from experiments.transformer_xl.presets import PRESETS, model_config
from tests.experiments.small_runs import small_preset


@pytest.mark.slow
def test_the_wide_layer_is_as_many_layers_of_a_transformer_xl() -> None:
    """With one expert it computes what the expert computes, from its parameters. With two it has twice the FLOPs."""
    config = model_config(small_preset("dmoe"), 60)
    expert, one = config.expert(), WideLayer(replace(config, k_best=1))
    params = expert.init(jax.random.key(0))
    hidden, memory = (jax.random.normal(jax.random.key(n), (3, 6, 16)) for n in (1, 2))
    mask = jnp.arange(6)[None] >= jnp.array([[0], [3], [6]])
    expected = expert.apply(params, hidden, memory, mask)
    np.testing.assert_allclose(one.apply({"params": params}, hidden, memory, mask), expected, atol=1e-5)

    wide = jax.eval_shape(WideLayer(config).init, jax.random.key(0), hidden, memory, mask)["params"]
    flops = []
    for own in (params, wide):
        num_heads, d_head = own["content_bias"].shape
        d_ff = own["ff_in"]["bias"].size
        flops.append(layer_flops(seq_len=6, mem_len=6, d_model=16, num_heads=num_heads, d_head=d_head, d_ff=d_ff))
    assert config.k_best == 2
    assert flops[1] == 2 * flops[0]


def test_the_ratio_is_the_median_over_rounds(tmp_path: Path) -> None:
    """Ratios 1.5, 2 and 1; one round that something else disturbed does not count."""
    run = Run(settings=OverheadSettings(), folder=RunFolder.create(tmp_path, {}), console=Console(quiet=True))
    assert summarise(run) is None
    run.log("memory", ratio=1.25)
    for dense_s, moe_s in ((0.1, 0.15), (0.1, 0.2), (0.4, 0.4)):
        ratio = moe_s / dense_s
        run.log("round", dense_s=dense_s, moe_s=moe_s, ratio=ratio, grid_ratio=ratio + 1, tokens_per_step=100)
    result = summarise(run)
    assert result is not None
    assert result.missed_bars == ["moe_overhead", "local_grid_cost"]
    names = ("moe_overhead", "local_grid_cost", "token_memory", "moe_tokens_per_s", "dense_tokens_per_s")
    assert [result.figures[name] for name in names] == pytest.approx([1.5, 2.5, 1.25, 500, 1000])


@pytest.mark.slow
def test_memory_of_more_rows_stays_below_its_bar() -> None:
    """At most twice as much for four times the rows; both hold the gradients of 64 experts of 100 thousand numbers."""
    few, many = map(peak_bytes, TOKENS)
    assert 64 * 100_000 * 4 < few < many <= 2 * few


@pytest.mark.slow
def test_the_command_measures_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model, whose preset drops what the measurement does not."""
    monkeypatch.setitem(PRESETS, ("dmoe", "tiny"), small_preset("dmoe", num_layers=1, layer={"dropout": 0.5}))
    monkeypatch.setattr(measurement, "VOCAB_SIZE", 60)
    args = ["--quick", "--out", str(tmp_path / "run")]
    headline = run_experiment(OverheadSettings, measurement.EXPERIMENT, name="moe_overhead", args=args)
    assert headline["moe_overhead"] > 0
    assert headline["local_grid_cost"] > 0
    assert headline["rounds"] == 3
    assert set(headline["missed_bars"]) <= {"moe_overhead", "local_grid_cost"}  # those of time
    assert (tmp_path / "run" / "report.md").exists()
