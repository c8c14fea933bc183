"""The price of a mixture: what it is measured against has its FLOPs, and the figures are counted right."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import run_experiment
from experiments.moe_overhead import measurement
from experiments.moe_overhead.measurement import WideLayer
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


@pytest.mark.slow
def test_the_command_measures_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model, whose preset drops what the measurement does not: 18 words in a step, three sequences of six."""
    monkeypatch.setitem(PRESETS, ("dmoe", "tiny"), small_preset("dmoe", num_layers=1, layer={"dropout": 0.5}))
    monkeypatch.setattr(measurement, "VOCAB_SIZE", 60)
    args = ["--quick", "--out", str(tmp_path / "run")]
    headline = run_experiment(OverheadSettings, measurement.EXPERIMENT, name="moe_overhead", args=args)
    for name in ("moe_overhead", "local_grid_cost"):
        assert 0 < headline[f"{name}_min"] <= headline[name] <= headline[f"{name}_max"]
    assert headline["moe_tokens_per_s"] == pytest.approx(18 / headline["moe_step_s"])
    assert headline["rounds"] == 3
    assert "token_memory" not in headline["missed_bars"]
