"""Training on one device: the jitted step is the step that the equations ask for, and says when it is none."""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.arrays import PyTree
from dmoe_jax.data.batches import SegmentStream
from dmoe_jax.layer_config import LayerConfig, Recipe
from dmoe_jax.model import Evaluation
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.trunk import forget, step_keys
from dmoe_jax.optim.recipe import make_optimizer
from dmoe_jax.routing.base import Router, RouterError, gather_logits
from dmoe_jax.routing.noisy_top_k import noisy_top_k
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.trainer import StepRecord
from dmoe_jax.training.engine import Engine
from dmoe_jax.training.run import train_without_waiting
from experiments.transformer_xl import dense
from experiments.transformer_xl.flops import layer_flops
from experiments.transformer_xl.local import LocalEngine
from experiments.transformer_xl.presets import PRESETS, Preset, model_config
from experiments.transformer_xl.settings import Model
from experiments.transformer_xl.setup import Setup
from tests.experiments.small_runs import IN_LAYERS, IN_TRUNK, UNBOUNDED, small_corpus, small_preset

STEPS = 20
MODELS: tuple[Model, ...] = ("base", "dmoe", "small")
ROUTERS = {"dmoe": product_key((2, 2)), "small": None}


def local_engine(preset: Preset, router: Router | None = None) -> LocalEngine:
    return LocalEngine(Setup(preset=preset, corpus=small_corpus(), steps=STEPS, seed=0, router=router))


def noisy_engine() -> LocalEngine:
    """One layer, with all noise and dropout."""
    preset = small_preset("dmoe", num_layers=1, layer=IN_LAYERS, **IN_TRUNK)
    preset = replace(preset, recipe=replace(preset.recipe, warmup_steps=0))
    return local_engine(preset, noisy_top_k((2, 2)))


def advance(engine: LocalEngine, num_steps: int) -> list[StepRecord]:
    records: list[StepRecord] = []
    train_without_waiting(engine.advance(num_steps, records.append, lambda trainer, error: None))
    return records


def evaluate(engine: LocalEngine, max_items: int | None = None, on_batch: Any = lambda *_: None) -> Evaluation:
    return train_without_waiting(engine.evaluate("valid", max_items=max_items, on_batch=on_batch))


def near(found: PyTree, expected: PyTree, atol: float = 1e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=1e-4), found, expected)


def step_by_hand(setup: Setup, state: PyTree, step: int) -> tuple[PyTree, list[PyTree], float]:
    """Trunk, experts and loss after one update. Nothing is stacked or gathered: every expert has all samples, and of
    its outputs those count that were asked for."""
    config, router = setup.config, setup.router
    assert router is not None
    batch = SegmentStream(setup.corpus.train, batch_size=3, seq_len=6, seed=0, position=step).at(step)
    parts = txl.segments(config, router)
    keys = step_keys(num_layers=config.num_layers, batch=3, seed=0, trainer=0, step=step)

    @jax.jit
    def loss(trunk: PyTree, experts: list[list[PyTree]], batch: Any, memory: Any, keys: Any) -> Any:
        memory = forget(memory, batch.is_first)
        hidden = parts.embed(trunk["embed"], batch.tokens, keys.embed)
        penalty, used = 0.0, []
        for i in range(config.num_layers):
            scores = parts.gate(trunk["gates"][i], hidden, memory[i], batch.tokens[:, 0], keys.gates[i])
            inputs = txl.expert_inputs(config, hidden, memory[i], keys.experts[i])
            indices, mask = router.select(scores, config.k_best, None)
            weights = router.combine(gather_logits(scores, indices, config.grid_size), mask)
            penalty += router.aux_loss(scores, indices, mask)
            mixed = hidden
            for n, expert in enumerate(experts[i]):
                is_chosen = (indices[..., 0] == n // 2) & (indices[..., 1] == n % 2)
                weight = jnp.sum(jnp.where(is_chosen, weights, 0), axis=1)[:, None, None]
                mixed = mixed + weight * (config.expert().apply(expert, *inputs) - hidden)
                used.append(is_chosen.any())
            hidden = mixed
        nll = parts.loss_head(trunk["embed"], trunk["head"], hidden, batch.targets, batch.mask, keys.head)
        return nll + penalty, (nll, used)

    def updated(recipe: Recipe, params: PyTree, opt_state: PyTree, grads: PyTree) -> PyTree:
        updates, _ = make_optimizer(recipe).update(grads, opt_state, params)
        return optax.apply_updates(params, updates)

    unstacked = [[jax.tree.map(lambda leaf, n=n: leaf[n], layer) for n in range(4)] for layer in state["experts"]]
    gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, (nll, used)), (grads, expert_grads) = gradient(state["trunk"], unstacked, batch, state["memory"], keys)
    update_trunk = jax.jit(functools.partial(updated, setup.recipe))
    trunk = update_trunk(state["trunk"], state["trunk_opt_state"], grads)
    experts = []
    update = jax.jit(functools.partial(updated, setup.expert_recipe))
    for i, n in itertools.product(range(config.num_layers), range(4)):
        opt_state = jax.tree.map(lambda leaf, n=n: leaf[n], state["expert_opt_states"][i])
        is_used = bool(used[4 * i + n])
        experts.append(update(unstacked[i][n], opt_state, expert_grads[i][n]) if is_used else unstacked[i][n])
    return trunk, experts, float(nll)


@pytest.mark.slow
def test_the_step_of_a_mixture_is_that_of_the_equations() -> None:
    """Its second update equals, to 1e-5, one made expert by expert, with all noise and dropout."""
    engine = noisy_engine()
    advance(engine, 1)  # memory and moments are no longer zero
    before = jax.tree.map(jnp.array, engine.state())
    trunk, experts, nll = step_by_hand(engine.setup, before, 1)
    (record,) = advance(engine, 1)
    assert record.loss == pytest.approx(nll, abs=1e-5)
    near(engine.state()["trunk"], trunk)
    ours = [jax.tree.map(lambda leaf, n=n: leaf[n], layer) for layer in engine.state()["experts"] for n in range(4)]
    near(ours, experts)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), engine.state()["trunk"], before["trunk"])
    assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.slow
def test_a_mixture_of_one_expert_is_the_dense_model() -> None:
    """With one layer, the same weights and no bound on norms, both take the same updates."""
    presets = small_preset("dmoe", num_layers=1, grid_size=(1,), k_best=1), small_preset("small", num_layers=1)
    mixed, plain = (replace(preset, recipe=UNBOUNDED, expert_recipe=UNBOUNDED) for preset in presets)
    mixture, single = local_engine(mixed, product_key((1,))), local_engine(plain)
    layer = jax.tree.map(lambda leaf: leaf[0], mixture.state()["experts"][0])
    biases = {"content": layer["content_bias"], "position": layer["position_bias"]}
    trunk = mixture.state()["trunk"]
    params = {
        "embed": trunk["embed"],
        "biases": biases,
        "layers": {
            name: jax.tree.map(lambda leaf: leaf[None], part)
            for name, part in layer.items()
            if not name.endswith("_bias")
        },
        "head": trunk["head"],
    }
    optimizer = make_optimizer(single.setup.recipe)
    state = single.state() | {"trunk": params, "trunk_opt_state": optimizer.init(params)}
    single.load(0, state, {"items": 0, "position": 0})
    ours, theirs = advance(mixture, 4), advance(single, 4)
    assert [record.loss for record in ours] == pytest.approx([record.loss for record in theirs], abs=1e-4)
    assert ours[0].loss != pytest.approx(ours[-1].loss, abs=1e-3)
    near(mixture.state()["trunk"]["embed"], single.state()["trunk"]["embed"], atol=1e-4)
    after = jax.tree.map(lambda leaf: leaf[0], mixture.state()["experts"][0])
    near(after["ff_in"], dense.layers_of(single.state()["trunk"])[0]["ff_in"], atol=1e-4)
    evaluations = [evaluate(engine).loss for engine in (mixture, single)]
    assert evaluations[0] == pytest.approx(evaluations[1], abs=1e-4)


@pytest.mark.parametrize("model", [pytest.param("dmoe", marks=pytest.mark.slow), "small"])
def test_every_step_is_reported_once_and_in_order(model: Any) -> None:
    """The report lags behind the device, but never past the end of a stretch; totals agree with it."""
    engine = local_engine(small_preset(model), ROUTERS[model])
    assert isinstance(engine, Engine)
    records = advance(engine, 3) + advance(engine, 1) + advance(engine, 2)
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    assert {(record.items, record.staleness) for record in records} == {(18, 0)}
    totals = engine.totals()
    assert (engine.step, totals.items) == (6, 6 * 18)
    # 6 steps of 3 sequences to 2 experts in each of 2 layers.
    assert sum(totals.load.values()) == (72 if model == "dmoe" else 0)
    assert len(totals.load) == (8 if model == "dmoe" else 0)


@pytest.mark.slow
def test_a_broken_router_is_named() -> None:
    """Scores of NaN out of sound inputs are the router's fault: its name, the layer, the step and the model."""
    engine = local_engine(small_preset("dmoe"), ROUTERS["dmoe"])
    advance(engine, 2)
    state = jax.tree.map(jnp.array, engine.state())
    state["trunk"]["gates"][1] = jax.tree.map(lambda leaf: leaf * jnp.nan, state["trunk"]["gates"][1])
    engine.load(engine.step, state, engine.facts())
    with pytest.raises(RouterError, match=r"router 'product_key'.* in layer1 .* in step 3 of dmoe"):
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
