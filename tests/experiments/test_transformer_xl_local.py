"""Training on one device: the jitted step, what it reports, and the sizes of the models."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dmoe_jax.arrays import PyTree
from dmoe_jax.autodiff import without_waiting
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.routing import Router, product_key
from dmoe_jax.trainer import StepRecord
from dmoe_jax.training.engine import Engine
from experiments.transformer_xl import dense
from experiments.transformer_xl.flops import layer_flops
from experiments.transformer_xl.local import LocalEngine
from experiments.transformer_xl.presets import PRESETS, Preset, model_config
from experiments.transformer_xl.settings import Model
from experiments.transformer_xl.setup import Setup
from tests.experiments.small_runs import small_corpus, small_preset

MODELS: tuple[Model, ...] = ("base", "dmoe", "small")


def local_engine(preset: Preset, router: Router | None = None) -> LocalEngine:
    return LocalEngine(Setup(preset=preset, corpus=small_corpus(), steps=20, seed=0, router=router))


def advance(engine: LocalEngine, num_steps: int) -> list[StepRecord]:
    records: list[StepRecord] = []
    without_waiting(engine.advance(num_steps, records.append, lambda trainer, error: None))
    return records


@pytest.mark.slow
def test_every_step_is_reported_and_a_broken_one_named() -> None:
    """Records and totals of stretches; a loss of NaN ends the run with the model and the step."""
    engine = local_engine(small_preset("dmoe"), product_key((2, 2)))
    assert isinstance(engine, Engine)
    records = advance(engine, 3) + advance(engine, 1)
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert {(record.items, record.staleness) for record in records} == {(18, 0)}
    # 4 steps of 3 sequences to 2 experts in each of 2 layers.
    assert (engine.totals().items, sum(engine.totals().load.values())) == (4 * 18, 48)
    assert len(engine.totals().load) == 8
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, engine.state()["trunk"])
    engine.load(4, engine.state() | {"trunk": broken}, {})
    with pytest.raises(FloatingPointError, match=r"dmoe: loss nan of step 5, or its gradient, is not finite"):
        advance(engine, 2)


@pytest.mark.parametrize("size", ["tiny", "full"])
def test_a_layer_of_base_has_the_products_of_four_experts(size: Any) -> None:
    """All products but the attention's go with the square of the width; that one goes with the width."""
    base, dmoe, small = (PRESETS[model, size].config.layer for model in MODELS)

    def flops(layer: LayerConfig) -> tuple[int, int]:
        def of(mem_len: int, seq_len: int) -> int:
            sizes = {"d_model": layer.d_model, "num_heads": layer.num_heads, "d_ff": layer.d_ff}
            return layer_flops(seq_len=seq_len, mem_len=mem_len, d_head=layer.d_model // layer.num_heads, **sizes)

        return of(0, 1) - 6 * layer.d_model, of(layer.mem_len, layer.seq_len)

    (products, whole), (expert_products, expert_whole) = flops(base), flops(dmoe)
    assert products == 4 * expert_products
    assert 0.7 < whole / (4 * expert_whole) < 1
    assert dmoe == small
    mixture = PRESETS["dmoe", size].config
    assert math.prod(mixture.grid_size) == {"tiny": 8, "full": 16}[size]
    assert mixture.k_best == 4


def test_the_full_size_has_the_papers_parameters() -> None:
    """By hand: a layer of width d has 5 d^2 for attention, 2 d f + f + d feeding forward, 4 d for norms."""
    vocab = 33_278
    base, dmoe, small = (model_config(PRESETS[model, "full"], vocab) for model in MODELS)
    key, router = jax.random.key(0), product_key((4, 4))

    def count(init: Callable[..., PyTree], *args: Any) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(lambda: init(key, *args))))

    assert base.cutoffs == (20_000,)
    layer_of_base = 5 * 400**2 + (2 * 400 * 900 + 900 + 400) + 4 * 400
    layer_of_small = 5 * 200**2 + (2 * 200 * 450 + 450 + 200) + 4 * 200
    assert (layer_of_base, layer_of_small) == (1_522_900, 381_450)
    # Tied embedding, biases of the words, one cluster token; u and v.
    assert count(dense.init, base) == 16 * layer_of_base + vocab * 400 + vocab + 401 + 2 * 400
    assert count(dense.init, small) == 16 * layer_of_small + vocab * 200 + vocab + 201 + 2 * 200
    # Every expert has its own u and v; the router of a 4 x 4 grid has a norm and 8 scores a layer.
    assert count(router.init, 200) == 2 * 200 + 8 * 200 + 8
    assert count(txl.init_experts, dmoe) == 256 * (layer_of_small + 2 * 200)
