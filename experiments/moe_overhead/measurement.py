"""Steps of both models in turns, in one process, each timed alone; and those of one layer, with few and many experts.

They take turns at every step: where other work comes and goes, it slows both. Same text, batch, trunk and kind of
optimiser. Dropout is left out on both sides: what is measured is the mixture.

The dense layer that a mixture is measured against: k experts of H heads and a feed-forward network of width F do, in
each product, what k H heads and a width of k F do. The heads have the same width and see the same d_model, so that q,
k, v and the output of the attention, its scores and weighted sums, and both matrices of the feed-forward network are k
times as much work. Only what touches single numbers (residual, LayerNorm) happens once instead of k times, and there
is no router.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from dmoe_jax.arrays import PyTree
from dmoe_jax.autodiff import without_waiting
from dmoe_jax.data import Batch, Corpus, Vocabulary
from dmoe_jax.data.wikitext2 import VOCAB_SIZE
from dmoe_jax.experts import feedforward
from dmoe_jax.experts.relative_attention import relative_attention, relative_positions, visible_keys
from dmoe_jax.mixture.local import init_experts
from dmoe_jax.mixture.local_update import chosen_value_and_grad, init_opt_states, update_chosen
from dmoe_jax.models import TransformerXLConfig
from dmoe_jax.models.layers import LayerAux, dmoe_layer
from dmoe_jax.models.trunk import embed, empty_memory, forget, init_embed_and_head, next_memory, token_nll
from dmoe_jax.optim import make_optimizer
from dmoe_jax.routing import Router, product_key, score
from experiments.bench import Experiment, Run
from experiments.moe_overhead.settings import OverheadSettings
from experiments.results import Bar, Result
from experiments.rounds import SLICE, Ratio, measure_rounds, round_figures
from experiments.transformer_xl.local import LocalEngine
from experiments.transformer_xl.presets import PRESETS
from experiments.transformer_xl.setup import Setup

RATIOS = (
    Ratio("moe_overhead", "step_s", "moe", "dense", "<=", 1.2),
    Ratio("local_grid_cost", "step_s", "many_experts", "few_experts", "<=", 1.3),
)
"""The step of a mixture over that of a dense layer of equal FLOPs; the step of a layer with 64 experts over that of one
with 16, of equal rows."""
MEMORY_BAR = Bar(name="token_memory", bound=2.0)
"""The memory of 2,048 rows over that of 512."""

D_MODEL = 64
"""Width of the layer. An expert has 100 thousand parameters, and a row goes to four."""
GRIDS = ((4, 4), (8, 8))
"""The grids whose time is compared."""
GRID_ROWS = 4
"""Rows of a step whose time is taken: 16 calls of experts, so that most experts of the larger grid have none."""
TOKENS = (512, 2048)
"""Rows of the passes whose memory is compared, in the larger grid."""


def measure(run: Run[OverheadSettings]) -> None:
    """Time the models and the layers, round after round: the median seconds of a step of each."""
    seed, setup = run.settings.seed, overhead_setup(run.settings.seed)
    few_bytes, many_bytes = map(peak_bytes, TOKENS)
    run.log("sizes", memory_ratio=many_bytes / few_bytes, tokens_per_step=setup.rows * setup.config.seq_len)
    run.say("compiling")
    engine, (few, many) = LocalEngine(setup), GRIDS

    def step() -> None:
        without_waiting(engine.advance(1, lambda record: None, lambda trainer, error: None))
        jax.block_until_ready(engine.state())

    models = {"moe": step, "dense": wide_training(setup)}
    layers = {"many_experts": grid_training(many, seed), "few_experts": grid_training(few, seed)}
    rounds, steps = (3, 5) if run.settings.quick else (9, 10)
    # Steps of a layer take a millisecond.
    turns = [partial(_in_turns, models, steps), partial(_in_turns, layers, 10 * steps)]
    measure_rounds(run, turns, RATIOS, rounds=rounds)


def _in_turns(ways: dict[str, Callable[[], None]], steps: int) -> dict[str, dict[str, float]]:
    """Median seconds of a step of each way. They take turns at every step, and in turns who goes first."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(steps):
        for name in list(ways) if turn % 2 else reversed(ways):
            started = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - started)
    return {name: {"step_s": median(own)} for name, own in seconds.items()}


def overhead_setup(seed: int) -> Setup:
    """The tiny preset's mixture without dropout, over words drawn by Zipf's law.

    So the adaptive softmax has about the work that it has on real text.
    """
    preset = PRESETS["dmoe", "tiny"]
    rates = ("dropout", "attention_dropout", "position_dropout", "embedding_dropout", "input_dropout", "output_dropout")
    config = preset.config.replace(**dict.fromkeys(rates, 0.0))
    weights = 1 / (np.arange(VOCAB_SIZE) + 2.7)
    count = 20 * preset.batch_size * config.seq_len + 1
    words = np.random.default_rng(seed).choice(VOCAB_SIZE, count, p=weights / weights.sum()).astype(np.int32)
    vocabulary = Vocabulary(tuple(map(str, range(VOCAB_SIZE))))
    return Setup(
        preset=replace(preset, config=config, unigram_biases=False),
        corpus=Corpus(name="zipf", description="", train=words, valid=words, test=words, vocabulary=vocabulary),
        steps=10_000,  # for the schedules of the optimisers alone
        seed=seed,
        router=product_key(config.grid_size),
    )


def _stepper(train: Callable[..., Any], state: Any, batches: Iterator[Any]) -> Callable[[], None]:
    """Makes the next step, with the jitted (state, batch) -> state, and waits for it."""

    def step() -> None:
        nonlocal state
        state = jax.block_until_ready(train(state, next(batches)))

    return step


def summarise(run: Run[OverheadSettings]) -> Result | None:
    """Take medians over the rounds; None where none is finished."""
    figures = round_figures(run.records(SLICE), RATIOS, ("step_s",))
    if figures is None:
        return None
    sizes = run.records("sizes")[-1]
    figures["token_memory"] = sizes["memory_ratio"]
    for name in ("moe", "dense"):
        figures[f"{name}_tokens_per_s"] = sizes["tokens_per_step"] / figures[f"{name}_step_s"]
    bars = [*(ratio.bar for ratio in RATIOS), MEMORY_BAR]
    return Result(title="What a mixture costs on one device", figures=figures, bars=bars)


class WideLayer(nn.Module):
    """A Transformer-XL layer with the FLOPs of the `k_best` experts that a sequence goes to. Without dropout.

    Attributes:
      config: the mixture.
    """

    config: TransformerXLConfig

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "batch seq_len d_model"],
        memory: Float[Array, "batch mem d_model"],
        memory_mask: Bool[Array, "batch mem"],
    ) -> Float[Array, "batch seq_len d_model"]:
        """The layer's output for each position. No gradient flows into the memory."""
        k, layer, d_model = self.config.k_best, self.config.layer, self.config.d_model
        heads = (k * layer.num_heads, d_model // layer.num_heads)
        normal, dtype = nn.initializers.normal(0.02), jnp.dtype(layer.compute_dtype)
        dense = partial(nn.DenseGeneral, kernel_init=normal, use_bias=False, dtype=dtype)
        norm = partial(nn.LayerNorm, epsilon=1e-5, dtype=jnp.float32)
        context = jnp.concatenate([jax.lax.stop_gradient(memory), hidden], axis=1)
        attended = relative_attention(
            dense(heads, name="query")(hidden),
            dense(heads, name="key")(context),
            dense(heads, name="value")(context),
            dense(heads, name="position")(jnp.asarray(relative_positions(context.shape[1], d_model))[None]),
            self.param("content_bias", normal, heads),
            self.param("position_bias", normal, heads),
            visible_keys(memory_mask, hidden.shape[1]),
        )
        output = dense(d_model, axis=(-2, -1), name="output")(attended)
        attention = norm(name="attention_norm")(hidden + output.astype(hidden.dtype))
        inner = nn.relu(dense(k * layer.d_ff, use_bias=True, name="ff_in")(attention))
        outer = dense(d_model, use_bias=True, name="ff_out")(inner)
        return cast(Array, norm(name="ff_norm")(attention + outer.astype(hidden.dtype)))


def wide_training(setup: Setup) -> Callable[[], None]:
    """Makes the next step of the setup's model with a dense layer for each mixture.

    Each layer has an optimiser of its own, as every expert has.
    """
    config, layer = setup.config, WideLayer(setup.config)
    names = [f"layer{index}" for index in range(config.num_layers)]
    parts = {"trunk": make_optimizer(setup.recipe)} | dict.fromkeys(names, make_optimizer(setup.expert_recipe))
    optimizer = optax.partition(parts, {"trunk": "trunk", "layers": names})

    @partial(jax.jit, donate_argnums=0)
    def train(state: Any, batch: Batch) -> Any:
        params, opt_state, memory, _ = state
        memory = forget(memory, jnp.asarray(batch.is_first))
        tokens, targets = jnp.asarray(batch.tokens), jnp.asarray(batch.targets)

        def loss(params: Any) -> tuple[Array, Any]:
            trunk, memories = params["trunk"], []
            hidden = embed(trunk["embed"], tokens, config)
            for own, past in zip(params["layers"], memory, strict=True):
                memories.append(next_memory(past, hidden))
                hidden = cast(Array, layer.apply({"params": own}, hidden, past.states, past.mask))
            nll = token_nll(trunk["embed"], trunk["head"], hidden, targets, config)
            return jnp.mean(nll), tuple(memories)

        (nll, memory), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, memory, nll

    embed_key, head_key, layer_key = jax.random.split(jax.random.key(setup.seed), 3)
    embed_params, head_params = init_embed_and_head(embed_key, head_key, config)
    sample, filled = jnp.zeros((1, 1, config.d_model)), jnp.ones((1, 1), bool)
    init = jax.jit(lambda own: layer.init(own, sample, sample, filled)["params"])
    params = {
        "trunk": {"embed": embed_params, "head": head_params},
        "layers": [init(own) for own in jax.random.split(layer_key, config.num_layers)],
    }
    state = params, optimizer.init(params), empty_memory(config, setup.rows), jnp.zeros(())
    return _stepper(train, state, setup.stream())


def _init(router: Router, key: Array) -> tuple[PyTree, PyTree]:
    experts = init_experts(key, feedforward(d_model=D_MODEL), "ffn", router.grid_size)
    return router.init(key, D_MODEL), experts


def _loss(
    router: Router, gate: PyTree, experts: tuple[PyTree], x: Float[Array, "rows d_model"]
) -> tuple[Array, tuple[LayerAux]]:
    """A loss that every output has a part in, for the layer's stacked parameters; and what the layer did."""
    scores = score(router, gate, x)
    mixed, aux = dmoe_layer(feedforward(d_model=D_MODEL), experts[0], router, 4, scores, None, x)
    return jnp.mean(jnp.square(mixed)) + aux.aux_loss, (aux,)


def grid_training(grid_size: tuple[int, int], seed: int) -> Callable[[], None]:
    """Makes the next training step of a layer with such a grid, each of whose experts has an optimiser of its own."""
    router, key, optimizer = product_key(grid_size), jax.random.key(seed), optax.adam(1e-3)
    batches = itertools.cycle(jax.random.normal(key, (16, GRID_ROWS, D_MODEL)))
    gradient = chosen_value_and_grad(partial(_loss, router), layers_of=lambda aux: aux)

    @partial(jax.jit, donate_argnums=0)
    def train(state: Any, x: Array) -> Any:
        gate, gate_state, experts, expert_state = state
        (_, (aux,)), (grads, (expert_grads,)) = gradient(gate, (experts,), x)
        updates, gate_state = optimizer.update(grads, gate_state, gate)
        experts, expert_state = update_chosen(optimizer, experts, expert_state, expert_grads, aux.load > 0)
        return optax.apply_updates(gate, updates), gate_state, experts, expert_state

    gate, experts = jax.jit(partial(_init, router))(key)
    state = gate, optimizer.init(gate), experts, init_opt_states(optimizer, experts)
    return _stepper(train, state, batches)


def peak_bytes(num_tokens: int) -> int:
    """Temporary and returned memory of a forward and backward pass of so many rows, as the compiler plans it."""
    router = product_key(GRIDS[-1])
    gate, experts = jax.eval_shape(partial(_init, router), jax.random.key(0))
    x = jax.ShapeDtypeStruct((num_tokens, D_MODEL), jnp.float32)
    gradient = jax.value_and_grad(partial(_loss, router), argnums=(0, 1, 2), has_aux=True)
    analysis = jax.jit(gradient).lower(gate, (experts,), x).compile().memory_analysis()
    assert analysis is not None  # on CPU and GPU there is one
    return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes)


EXPERIMENT = Experiment(measure=measure, summarise=summarise)
