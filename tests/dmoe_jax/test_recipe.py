"""The recipe's optimiser: PyTorch's Adam with L2 behind a clipped gradient, warm-up and cosine, one object a recipe."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.layer_config import Recipe
from dmoe_jax.optim.recipe import learning_rate_schedule, make_optimizer


def adam_in_numpy(recipe: Recipe, params: list[np.ndarray], grads: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Parameters as `torch.nn.utils.clip_grad_norm_` and `torch.optim.Adam(weight_decay=...)` make them, in float64."""
    params = [param.astype(np.float64) for param in params]
    first, second = ([np.zeros_like(param) for param in params] for _ in range(2))
    assert recipe.total_steps is not None
    warmup = min(recipe.warmup_steps, recipe.total_steps // 4)
    for step, step_grads in enumerate(grads):
        norm = math.sqrt(sum((grad.astype(np.float64) ** 2).sum() for grad in step_grads))
        if step < warmup:
            rate = recipe.learning_rate * step / warmup
        else:
            part = (step - warmup) / (recipe.total_steps - warmup)
            rate = recipe.learning_rate * (1 + math.cos(math.pi * part)) / 2
        for i, grad in enumerate(step_grads):
            own = grad * min(1.0, recipe.grad_clip / norm) + recipe.weight_decay * params[i]
            first[i] = 0.9 * first[i] + 0.1 * own
            second[i] = 0.999 * second[i] + 0.001 * own**2
            mean = first[i] / (1 - 0.9 ** (step + 1))
            square = second[i] / (1 - 0.999 ** (step + 1))
            params[i] = params[i] - rate * mean / (np.sqrt(square) + 1e-8)
    return params


def test_is_adam_with_l2_behind_a_clipped_gradient() -> None:
    """Twelve updates, with gradients above and below the bound, equal those of a hand-written Adam."""
    recipe = Recipe(learning_rate=0.03, warmup_steps=3, total_steps=12, weight_decay=0.1, grad_clip=1.0)
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(3, 2)).astype(np.float32), rng.normal(size=4).astype(np.float32)]
    grads = [[scale * rng.normal(size=param.shape) for param in params] for scale in np.geomspace(0.05, 20, 12)]
    optimizer = make_optimizer(recipe)
    ours = params
    state = optimizer.init(ours)
    for step_grads in grads:
        updates, state = optimizer.update([grad.astype(np.float32) for grad in step_grads], state, ours)
        ours = optax.apply_updates(ours, updates)
    for own, expected in zip(ours, adam_in_numpy(recipe, params, grads), strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-5)
    assert max(abs(own - before).max() for own, before in zip(ours, params, strict=True)) > 0.05


def test_the_defaults_are_the_published_recipe() -> None:
    """3.5e-4 after 3,000 updates, half of it in the middle of the cosine, 0 at 125,000."""
    schedule = learning_rate_schedule(Recipe())
    found = [float(schedule(step)) for step in (0, 1500, 3000, 64_000, 125_000)]
    np.testing.assert_allclose(found, [0, 1.75e-4, 3.5e-4, 1.75e-4, 0], atol=1e-9)
    assert (Recipe().weight_decay, Recipe().grad_clip) == (1.2e-6, 0.25)


def test_a_short_run_warms_up_for_a_quarter_of_it() -> None:
    """With 40 updates the peak is reached at the tenth, not at the 3,000th."""
    schedule = learning_rate_schedule(Recipe(learning_rate=1.0, total_steps=40))
    np.testing.assert_allclose([float(schedule(step)) for step in (5, 10, 40)], [0.5, 1.0, 0.0], atol=1e-6)
    assert float(learning_rate_schedule(Recipe(learning_rate=1.0, total_steps=1))(0)) == 1.0


@pytest.mark.parametrize(("warmup_steps", "expected"), [(0, [1.0, 1.0, 1.0]), (10, [0.0, 0.5, 1.0])])
def test_without_an_end_the_rate_stays_at_its_peak(warmup_steps: int, expected: list[float]) -> None:
    """Whoever cannot know how many updates will come, as an expert's node, does not decay."""
    schedule = learning_rate_schedule(Recipe(learning_rate=1.0, warmup_steps=warmup_steps, total_steps=None))
    np.testing.assert_allclose([float(schedule(step)) for step in (0, 5, 100_000)], expected, atol=1e-6)


def test_equal_recipes_share_one_optimizer() -> None:
    """Compiled code is cached by its identity."""
    assert make_optimizer(Recipe(total_steps=100)) is make_optimizer(Recipe(total_steps=100))
    assert make_optimizer(Recipe(total_steps=100)) is not make_optimizer(Recipe(total_steps=200))


def test_without_clipping_and_decay_it_is_plain_adam() -> None:
    """An infinite bound and no decay leave Optax's Adam, whose state then has no other part."""
    recipe = Recipe(learning_rate=0.1, total_steps=None, warmup_steps=0, weight_decay=0.0, grad_clip=math.inf)
    ours, plain, params = make_optimizer(recipe), optax.adam(0.1), {"w": np.ones(3, np.float32)}
    grads = {"w": np.array([1e3, -1e-3, 2.0], np.float32)}
    found, _ = ours.update(grads, ours.init(params), params)
    expected, _ = plain.update(grads, plain.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


@pytest.mark.parametrize(("power", "share"), [(0.5, 1 / 2), (1.0, 1 / 4), (0.0, 1.0)])
def test_stale_updates_are_smaller(power: float, share: float) -> None:
    """Staleness 3 scales only the update; Adam's moments do not hear of it."""
    optimizer = optax.with_extra_args_support(make_optimizer(Recipe(warmup_steps=0, staleness_power=power)))
    params, grads = jnp.ones(3), jnp.array([1.0, -2.0, 3.0])
    fresh, fresh_state = optimizer.update(grads, optimizer.init(params), params)
    stale, stale_state = optimizer.update(grads, optimizer.init(params), params, staleness=3)
    np.testing.assert_allclose(stale, share * fresh, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, stale_state, fresh_state)


def test_checkpoints_do_not_hear_of_staleness() -> None:
    """The state is that of the recipe's parts alone, as it was before there was a power, whatever the power."""
    parts = [optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale_by_learning_rate(lambda step: 0.1)]
    expected = jax.tree.structure(optax.chain(*parts).init(jnp.ones(3)))
    for power in (0.0, 0.5):
        optimizer = make_optimizer(Recipe(weight_decay=0.0, grad_clip=1.0, staleness_power=power))
        assert jax.tree.structure(optimizer.init(jnp.ones(3))) == expected


@pytest.mark.parametrize("grad_clip", [1.0, 100.0, math.inf])
def test_clipping_and_decay_are_those_of_optax(grad_clip: float) -> None:
    """Both at once, with the updates and the state of the two one after the other."""
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.float32(rng.normal(size=(3, 4))), "bias": jnp.float32(rng.normal(size=4))}
    grads = jax.tree.map(lambda leaf: 5 * leaf, params)
    clip = [optax.clip_by_global_norm(grad_clip)] if math.isfinite(grad_clip) else []
    rate = optax.scale_by_learning_rate(lambda step: 3.5e-4)
    expected = optax.chain(*clip, optax.add_decayed_weights(0.1), optax.scale_by_adam(), rate)
    found = make_optimizer(Recipe(warmup_steps=0, total_steps=None, weight_decay=0.1, grad_clip=grad_clip))
    (own, own_state), (other, other_state) = (
        optimizer.update(grads, optimizer.init(params), params) for optimizer in (found, expected)
    )
    assert jax.tree.structure(own_state) == jax.tree.structure(other_state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), (own, own_state), (other, other_state))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("warmup_steps", -1),
        ("total_steps", 0),
        ("weight_decay", -1e-6),
        ("grad_clip", 0.0),
        ("staleness_power", -0.5),
        ("staleness_power", math.inf),
    ],
)
def test_a_wrong_value_is_named(field: str, value: float) -> None:
    """The message gives the field and what was got."""
    with pytest.raises(ValueError, match=rf"{field} must .*got {value}"):
        Recipe(**{field: value})  # type: ignore[arg-type]


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
