"""Experts called on grouped rows, in turns as all at once, in little memory."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.mixture import grouped
from dmoe_jax.mixture.grouped import TURN_BYTES, call_experts
from dmoe_jax.mixture.local_update import WithDeltas, zero_deltas

NUM_EXPERTS, BATCH, K = 6, 16, 3
X = TensorSpec(name="x", shape=(3,), dtype="float32", differentiable=True)


def apply(params: Any, x: Any, is_odd: Any, keys: Any = None) -> Any:
    noise = 0.0 if keys is None else keys[:, :1].astype(jnp.float32)
    return jnp.tanh(x @ params["w"]) * jnp.where(is_odd, 2.0, 1.0)[:, None] + params["b"] + noise


EXPERT = Expert(
    name="small",
    init=lambda key: {"w": jax.random.normal(key, (3, 2)), "b": jnp.zeros(2)},
    apply=apply,
    inputs=(X, TensorSpec(name="is_odd", shape=(), dtype="bool", differentiable=False)),
    output=TensorSpec(name="y", shape=(2,), dtype="float32", differentiable=True),
    takes_key=True,
)
"""With an input that has no gradient, keys, and an output of another shape than the input."""


def make_case(turn: int = 0) -> Any:
    """Parameters, choices, inputs and keys, with experts of which so many fit into a turn. Nobody chooses expert 2,
    which is NaN; a sixth of the slots have no expert; expert 1 is chosen by every sample: four blocks, of two turns."""
    rng = np.random.default_rng(0)
    params = jax.vmap(EXPERT.init)(jax.random.split(jax.random.key(0), NUM_EXPERTS))
    params["b"] = params["b"].at[2].set(jnp.nan)
    params["unused"] = jnp.zeros((NUM_EXPERTS, TURN_BYTES // (4 * turn) - 8 if turn else 1))
    chosen = rng.choice([0, 3, 4, 5, NUM_EXPERTS], (BATCH, K), p=[0.3, 0.1, 0.1, 0.25, 0.25])
    chosen[:, 1] = 1
    inputs = (jnp.asarray(rng.normal(size=(BATCH, 3)), jnp.float32), jnp.arange(BATCH) % 2 == 1)
    keys = {"keys": jnp.asarray(rng.integers(0, 5, (BATCH, 2)), jnp.uint32)}
    return params, jnp.asarray(chosen, jnp.int32), inputs, keys


def loops(params: Any, chosen: Any, inputs: Any, keyed: Any) -> Any:
    of_all = [apply(jax.tree.map(lambda leaf, n=n: leaf[n], params), *inputs, **keyed) for n in range(NUM_EXPERTS)]
    is_n = [(chosen == n)[..., None] for n in range(NUM_EXPERTS)]
    return sum(jnp.where(is_there, own[:, None], 0) for is_there, own in zip(is_n, of_all, strict=True))


@pytest.mark.parametrize("turn", [0, 2, 3])
def test_outputs_and_gradients_are_those_of_loops(turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once (0) or in turns: values, gradients of parameters and of the input, and those of the chosen alone."""
    params, chosen, inputs, keyed = make_case(turn)
    monkeypatch.setattr(grouped, "LARGE_COPIES", 0 if turn else grouped.LARGE_COPIES)

    def loss(call: Any, params: Any, x: Any) -> Any:
        outputs = call(params, chosen, (x, inputs[1]), keyed)
        return jnp.sum(jnp.sin(outputs)), outputs

    ours = functools.partial(call_experts, EXPERT)

    @jax.jit
    def run(params: Any, x: Any) -> Any:
        # Without the NaN, which a sum over all experts would see.
        sound = params | {"b": jnp.nan_to_num(params["b"])}
        expected = jax.value_and_grad(loss, argnums=(1, 2), has_aux=True)(loops, sound, x)
        found = jax.value_and_grad(loss, argnums=(1, 2), has_aux=True)(ours, params, x)

        def of_few(params: Any) -> Any:
            few = jax.tree.map(lambda part: part[:2], ((x, inputs[1]), keyed))
            return jnp.sum(jnp.sin(ours(params, chosen[:2, :2], *few)))

        all_of_few = jax.grad(of_few)(params)
        deltas = zero_deltas(params, 4)
        return expected, found, all_of_few, jax.grad(lambda deltas: of_few(WithDeltas(params, deltas)))(deltas)

    expected, found, all_of_few, compact = run(params, inputs[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
    np.testing.assert_array_equal(found[1][0]["w"][2], 0)
    by_number = np.unique(chosen[:2, :2])
    by_number = by_number[by_number < NUM_EXPERTS]
    assert len(by_number) == 3  # of four calls
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[:3], b[by_number], atol=1e-6), compact, all_of_few)
    np.testing.assert_array_equal(compact["w"][3], 0)


def test_too_few_deltas_are_refused() -> None:
    """Two deltas cannot hold the gradients of six experts."""
    params, chosen, inputs, keyed = make_case()
    with pytest.raises(ValueError, match="48 calls of 6 experts need as many deltas, got 2"):
        call_experts(EXPERT, WithDeltas(params, zero_deltas(params, 2)), chosen, inputs, keyed)


def test_nobody_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros, and no turn is taken: even experts of NaN do nothing."""
    params, chosen, inputs, keyed = make_case(2)
    monkeypatch.setattr(grouped, "LARGE_COPIES", 0)
    nan, nobody = jax.tree.map(lambda leaf: leaf * jnp.nan, params), jnp.full_like(chosen, NUM_EXPERTS)

    @jax.jit
    @jax.value_and_grad
    def run(params: Any) -> Any:
        return call_experts(EXPERT, params, nobody, inputs, keyed).sum()

    for leaf in jax.tree.leaves(run(nan)):
        np.testing.assert_array_equal(leaf, 0)


def test_memory_holds_no_copy_for_every_block() -> None:
    """Copies for all 1,216 blocks of four rows would take 80 MB; in turns they take 8, beside gradients of 16."""
    wide = TensorSpec(name="x", shape=(128,), dtype="float32", differentiable=True)
    expert = Expert("wide", lambda key: jnp.zeros((128, 128)), lambda w, x: jnp.tanh(x @ w), (wide,), wide)
    chosen = jnp.arange(4096, dtype=jnp.int32)[:, None] % 256

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def run(params: Any, x: Any) -> Any:
        return call_experts(expert, params, chosen, (x,), {}).sum()

    analysis = run.lower(jnp.zeros((256, 128, 128)), jnp.zeros((4096, 128))).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 64e6


def on_eight_devices(*arguments: str) -> list[str]:
    """The lines that Python prints, given these arguments and eight CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command, folder = [sys.executable, "-W", "error", *arguments], Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
