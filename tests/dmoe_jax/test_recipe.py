"""The recipe's optimiser: PyTorch's Adam with L2 behind a clipped gradient, warm-up and cosine, one object a recipe."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.layer_config import Recipe
from dmoe_jax.optim.recipe import learning_rate_schedule, make_optimizer


@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
@pytest.mark.parametrize("grad_clip", [1.0, 100.0, math.inf])
def test_is_adam_with_l2_behind_a_clipped_gradient(grad_clip: float, weight_decay: float) -> None:
    """Updates and states are those of Optax's parts in a row, whatever the power of the staleness."""
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.float32(rng.normal(size=(3, 4))), "bias": jnp.float32(rng.normal(size=4))}
    clip = [optax.clip_by_global_norm(grad_clip)] if math.isfinite(grad_clip) else []
    decay = [optax.add_decayed_weights(weight_decay)] if weight_decay else []
    for power in (0.5, 0.0):
        settings = {"weight_decay": weight_decay, "grad_clip": grad_clip, "staleness_power": power}
        recipe = Recipe(learning_rate=0.03, warmup_steps=1, total_steps=4, **settings)
        rate = optax.scale_by_learning_rate(learning_rate_schedule(recipe))
        found, expected = make_optimizer(recipe), optax.chain(*clip, *decay, optax.scale_by_adam(), rate)
        states = [found.init(params), expected.init(params)]
        for scale in (5.0, 0.05, 20.0):
            grads = jax.tree.map(lambda leaf, scale=scale: scale * jnp.cos(scale * leaf), params)
            (own, states[0]), (want, states[1]) = (
                each.update(grads, state, params) for each, state in zip((found, expected), states, strict=True)
            )
            assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), (own, states[0]), (want, states[1]))


PUBLISHED = {0: 0.0, 1500: 1.75e-4, 3000: 3.5e-4, 64_000: 1.75e-4, 125_000: 0.0}
"""3.5e-4 after 3,000 updates, half of it in the middle of the cosine, 0 at the end."""


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, PUBLISHED),
        # A short run warms up for a quarter of it.
        ({"learning_rate": 1.0, "total_steps": 40}, {5: 0.5, 10: 1.0, 40: 0.0}),
        ({"learning_rate": 1.0, "total_steps": 1}, {0: 1.0}),
        # Whoever cannot know how many updates will come, as an expert's node, does not decay.
        ({"learning_rate": 1.0, "total_steps": None, "warmup_steps": 0}, {0: 1.0, 5: 1.0, 100_000: 1.0}),
        ({"learning_rate": 1.0, "total_steps": None, "warmup_steps": 10}, {0: 0.0, 5: 0.5, 100_000: 1.0}),
    ],
    ids=["published", "short", "one update", "no end", "no end and a warm-up"],
)
def test_rates_by_hand(settings: dict[str, Any], rates: dict[int, float]) -> None:
    """The rate rises in a line and falls with a cosine."""
    schedule = learning_rate_schedule(Recipe(**settings))
    found = [float(schedule(step)) for step in rates]
    np.testing.assert_allclose(found, list(rates.values()), atol=1e-6 * max(rates.values()), rtol=5e-6)


def test_equal_recipes_share_one_optimizer() -> None:
    """Compiled code is cached by its identity. The defaults are the published ones."""
    one, same, other = (make_optimizer(Recipe(total_steps=steps)) for steps in (100, 100, 200))
    assert one is same is not other
    assert (Recipe().weight_decay, Recipe().grad_clip) == (1.2e-6, 0.25)


@pytest.mark.parametrize(("power", "share"), [(0.5, 1 / 2), (1.0, 1 / 4), (0.0, 1.0)])
def test_stale_updates_are_smaller(power: float, share: float) -> None:
    """Staleness 3 scales only the update; Adam's moments do not hear of it."""
    optimizer = optax.with_extra_args_support(make_optimizer(Recipe(warmup_steps=0, staleness_power=power)))
    params, grads = jnp.ones(3), jnp.array([1.0, -2.0, 3.0])
    fresh, fresh_state = optimizer.update(grads, optimizer.init(params), params)
    stale, stale_state = optimizer.update(grads, optimizer.init(params), params, staleness=3)
    np.testing.assert_allclose(stale, share * fresh, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, stale_state, fresh_state)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"learning_rate": rate} for rate in (0.0, math.nan)),
        *({"staleness_power": power} for power in (-0.5, math.inf)),
        *({"warmup_steps": -1}, {"total_steps": 0}, {"weight_decay": -1e-6}, {"grad_clip": 0.0}),
    ],
    ids=str,
)
def test_a_wrong_value_is_named(wrong: dict[str, Any]) -> None:
    """The message gives the field and what was got."""
    ((field, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"{field} must .*got {value}"):
        Recipe(**wrong)


def test_what_never_has_a_gradient_does_not_decay() -> None:
    """A frozen router's gate stays as it was drawn under the full recipe; what learns decays as before."""
    params = {"frozen": jnp.ones(3), "learns": jnp.ones(3)}
    optimizer = make_optimizer(Recipe(warmup_steps=0, total_steps=None, weight_decay=0.1))
    state = optimizer.init(params)
    for _ in range(10):
        grads = {"frozen": jnp.zeros(3), "learns": jnp.array([1e-3, 0.0, 0.0])}
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params["frozen"], np.ones(3))
    # Two of the three have no gradient of their own, but the array has: they decay, Adam making whole steps of it.
    np.testing.assert_allclose(params["learns"][1:], 1 - 10 * 3.5e-4, rtol=1e-4)
