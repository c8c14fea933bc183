"""ALBERT's optimiser: LAMB by its algorithm, what decays, warm-up and decay by hand, one object a recipe."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.collaborative.albert import AlbertConfig, init_albert
from experiments.collaborative.albert_recipe import AlbertRecipe, albert_optimizer, albert_schedule, decays


def lamb_in_numpy(
    recipe: AlbertRecipe, params: dict[str, np.ndarray], grads: list[dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """You et al. (2020), algorithm 2, with phi the identity, under a clipped gradient, in float64."""
    params = {name: param.astype(np.float64) for name, param in params.items()}
    first, second = ({name: np.zeros_like(param) for name, param in params.items()} for _ in range(2))
    for step, step_grads in enumerate(grads):
        norm = math.sqrt(sum((grad.astype(np.float64) ** 2).sum() for grad in step_grads.values()))
        if step < recipe.warmup_steps:
            rate = recipe.learning_rate * step / recipe.warmup_steps
        else:
            rate = recipe.learning_rate * (recipe.total_steps - step) / (recipe.total_steps - recipe.warmup_steps)
        for name, grad in step_grads.items():
            grad = grad * min(1.0, recipe.grad_clip / norm)
            first[name] = 0.9 * first[name] + 0.1 * grad
            second[name] = 0.999 * second[name] + 0.001 * grad**2
            mean = first[name] / (1 - 0.9 ** (step + 1))
            square = second[name] / (1 - 0.999 ** (step + 1))
            update = mean / (np.sqrt(square) + 1e-6)
            if name == "kernel":
                update = update + recipe.weight_decay * params[name]
            own, size = np.linalg.norm(params[name]), np.linalg.norm(update)
            params[name] = params[name] - rate * (own / size if own and size else 1.0) * update
    return params


@pytest.mark.parametrize("grad_clip", [1.0, math.inf])
def test_is_lamb_behind_a_clipped_gradient(grad_clip: float) -> None:
    """Ten updates with gradients above and below the bound; a bias of zeros has the ratio 1."""
    recipe = AlbertRecipe(learning_rate=0.05, warmup_steps=3, total_steps=10, weight_decay=0.3, grad_clip=grad_clip)
    rng = np.random.default_rng(0)
    start = {"kernel": rng.normal(size=(3, 2)), "bias": np.zeros(4), "scale": np.ones(3)}
    params = {name: np.asarray(param, np.float32) for name, param in start.items()}
    grads = [
        {name: (size * rng.normal(size=param.shape)).astype(np.float32) for name, param in params.items()}
        for size in np.geomspace(0.05, 20, 10)
    ]
    optimizer = albert_optimizer(recipe)
    own = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(own)
    for step_grads in grads:
        updates, state = optimizer.update(step_grads, state, own)
        own = optax.apply_updates(own, updates)
    expected = lamb_in_numpy(recipe, params, grads)
    for name, param in expected.items():
        np.testing.assert_allclose(own[name], param, rtol=1e-4, atol=1e-6)
        assert np.abs(param - params[name]).max() > 0.01


def test_schedule_by_hand() -> None:
    """Up in five updates, down in ten, then 0; without a warm-up the peak is the first update's."""
    schedule = albert_schedule(AlbertRecipe(learning_rate=0.5, warmup_steps=5, total_steps=15))
    rates = [float(schedule(step)) for step in (0, 1, 4, 5, 6, 10, 14, 15, 100)]
    np.testing.assert_allclose(rates, [0, 0.1, 0.4, 0.5, 0.45, 0.25, 0.05, 0, 0], atol=1e-7)
    schedule = albert_schedule(AlbertRecipe(learning_rate=0.5, warmup_steps=0, total_steps=10))
    np.testing.assert_allclose([float(schedule(step)) for step in (0, 5)], [0.5, 0.25])


def test_what_decays_in_albert() -> None:
    """Matrices and embeddings; none of the biases, those of the attention heads among them, and no gain."""
    config = AlbertConfig(vocab_size=9)
    params = jax.eval_shape(lambda key: init_albert(key, config), jax.random.key(0))
    kept = decays(params)
    assert kept["embed"] == {
        "words": {"embedding": True},
        "positions": {"embedding": True},
        "segments": {"embedding": True},
        "norm": {"scale": False, "bias": False},
        "project": {"kernel": True, "bias": False},
    }
    assert kept["layer"]["query"] == {"kernel": True, "bias": False}
    assert kept["layer"]["attention_norm"] == {"scale": False, "bias": False}
    assert kept["masked_head"]["bias"] is False
    # Parameters that are a single array, without a name, decay.
    assert decays([np.zeros(2)]) == [True]
