"""FLOPs counted by hand and in the program, and what is compared at equal FLOPs."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.layer_config import Route
from dmoe_jax.models.trunk import empty_memory
from experiments.transformer_xl import dense
from experiments.transformer_xl.flops import equal_flops, forward_flops, sequence_flops, softmax_flops
from experiments.transformer_xl.presets import model_config
from experiments.transformer_xl.settings import TrainingSettings
from experiments.transformer_xl.setup import Setup
from tests.experiments.small_runs import small_corpus, small_preset


def products(jaxpr: Any) -> Iterator[int]:
    """Multiplications and additions of each matrix product in a program, those of its inner programs too, as often as
    each is run."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            yield 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                times = equation.params["length"] if equation.primitive.name == "scan" else 1
                yield from (times * count for count in products(value.jaxpr))


@pytest.mark.slow
def test_the_count_is_that_of_the_program() -> None:
    """A dense model with a plain softmax, over one sequence: every product that JAX computes."""
    alone = TrainingSettings(where="local", batch_size=1)
    setup = Setup(preset=small_preset("small", cutoffs=()), corpus=small_corpus(), steps=1, seed=0, settings=alone)
    config, memory = setup.config, empty_memory(setup.config, 1)
    # The memory is empty at first, but has its length.
    program = jax.make_jaxpr(lambda params, batch: dense.forward(params, config, batch, memory)[0])
    batch = jax.tree.map(jnp.asarray, next(setup.stream()))
    counted = sum(products(program(setup.init_trunk(), batch).jaxpr))
    assert forward_flops(config, setup.corpus) * config.seq_len == pytest.approx(counted)


@pytest.mark.parametrize("route", ["sequence", "token"])
def test_a_mixture_computes_k_experts(route: Route) -> None:
    """A second expert in each of two layers: one more layer of the small model, or of tokens, which share the
    attention, one more feed-forward network, 2 x 2 x 16 x 24 a word."""
    corpus, settings = small_corpus(), TrainingSettings(where="local", route=route)
    small, dmoe = (model_config(small_preset(model), 60, settings) for model in ("small", "dmoe"))
    extra = sequence_flops(small.layer) / small.seq_len if route == "sequence" else 2 * 2 * 16 * 24
    assert forward_flops(dmoe, corpus) - forward_flops(small, corpus) == pytest.approx(2 * extra)


def test_the_softmax_by_hand() -> None:
    """Width 16, a head of 20 words and one cluster; of four words one lies in the tail of 40: 21 + 40 / 4 outputs."""
    config = model_config(small_preset("small"), 60)
    assert softmax_flops(config, np.array([0, 19, 20, 3])) == 2 * 16 * (21 + 10)


def test_equal_flops_by_hand() -> None:
    """Cheap ends at 3 * 2 * 100 = 600; dear has spent that after 50 words, half way between two points of its curve:
    exp of the mean of log 400 and log 100. A curve that begins later has no figure."""

    def curve(*points: tuple[int, float]) -> list[dict[str, Any]]:
        return [{"kind": "eval", "step": n, "items_seen": n, "perplexity": value} for n, value in points]

    runs = {
        "cheap": [curve((50, 300.0), (100, 250.0))],
        "dear": [curve((40, 400.0), (60, 100.0)), []],
        "late": [curve((60, 90.0), (70, 80.0))],
    }
    budget, found = equal_flops(runs, {"cheap": 2.0, "dear": 4.0, "late": 4.0})
    assert budget == 600
    assert found == {"cheap": [pytest.approx(250)], "dear": [pytest.approx(200)], "late": [None]}
    assert equal_flops({"none": [[]]}, {"none": 1.0}) == (0.0, {"none": []})
