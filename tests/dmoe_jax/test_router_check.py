"""A router with a mistake gets an error that names it and says what was expected."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from dmoe_jax.routing.base import Router, RouterError, Scores, as_scores, score
from dmoe_jax.routing.check import check_finite, check_router
from dmoe_jax.routing.flax_modules import router_from_linen
from dmoe_jax.routing.product_key import product_key

GRID = (2, 3)
SOUND = product_key(GRID)


def broken(**functions: Any) -> Router:
    return SOUND._replace(name="mine", **functions)


def scoring(parts_of: Any) -> Router:
    """A router whose scores are these, by x and key."""
    return broken(scores=lambda params, x, *, key=None, ids=None: parts_of(x, key))


def selecting(indices: Any) -> Router:
    """A router that selects these, all of which count."""
    return broken(select=lambda scores, k, alive=None: (indices, jnp.ones((3, 2), bool)))


def losing(loss: Any) -> Router:
    """A router with this auxiliary loss, by its scores."""
    return broken(aux_loss=lambda scores, indices, mask: loss(scores))


@dataclass
class Unhashable:
    """A callable with an equality of its own, and so without a hash."""

    def __call__(self, logits: Any, mask: Any) -> Any:
        return SOUND.combine(logits, mask)


class OnePiece(nn.Module):
    """A tuple with one array over the whole grid: no beam could search it dimension by dimension."""

    @nn.compact
    def __call__(self, x):
        return (nn.Dense(6)(x),)


THREE, TWO = (jnp.zeros((3, 2)), jnp.zeros((3, 3))), jnp.zeros((3, 2, 2), jnp.int32)
MISTAKES: dict[str, tuple[Router, str]] = {
    "init raises": (broken(init=lambda key, d_model: 1 // 0), "init raised ZeroDivisionError"),
    "scores too wide": (scoring(lambda x, key: (THREE[0], jnp.zeros((3, 4)))), r"got \(\(3, 2\), \(3, 4\)\)"),
    "scores of another batch": (scoring(lambda x, key: (jnp.zeros((1, 2)), jnp.zeros((1, 3)))), "for 3 samples"),
    "scores of integers": (scoring(lambda x, key: (jnp.zeros((3, 6), int),)), "floating numbers, got int32"),
    "no scores": (scoring(lambda x, key: None), "got NoneType"),
    "scores are NaN": (scoring(lambda x, key: (THREE[0] * jnp.nan, THREE[1])), "6 of 6 scores in a trial .* are NaN"),
    "scores are infinite": (scoring(lambda x, key: (THREE[0] + jnp.inf, THREE[1])), r"are \+inf"),
    "scores take no key": (broken(scores=lambda params, x: THREE), "scores raised TypeError"),
    "scores branch on numbers": (scoring(lambda x, key: THREE if x.sum() > 0 else None), "raised TracerBoolConversion"),
    "NaN in training only": (scoring(lambda x, key: tuple(t * (1 if key is None else jnp.nan) for t in THREE)), "NaN"),
    "select without a mask": (broken(select=lambda scores, k, alive=None: TWO), "select must return"),
    "select of two dimensions": (selecting(jnp.zeros((3, 2), jnp.int32)), r"indices \[3, slots, 2\]"),
    "select of floats": (selecting(jnp.zeros((3, 2, 2))), "must return int32 indices"),
    "select outside the grid": (selecting(TWO + 2), r"outside grid \(2, 3\)"),
    "select of one expert twice": (selecting(TWO + 1), r"select chose expert \(1, 1\) more than once for sample 0"),
    "select of the dead": (selecting(TWO.at[:, 1, 1].set(1)), "chose an expert that is not alive"),
    "weights of another shape": (broken(combine=lambda logits, mask: logits[:, :1]), r"weights \(3, 2\)"),
    "weights above 1": (broken(combine=lambda logits, mask: jnp.ones_like(logits)), "sum to at most 1"),
    "negative weights": (broken(combine=lambda logits, mask: -jnp.ones_like(logits)), "of at least 0"),
    "weights of NaN": (broken(combine=lambda logits, mask: logits * jnp.nan), "combine must return weights"),
    "weights for silent": (broken(combine=lambda logits, mask: jax.nn.softmax(logits)), "0 where the mask is False"),
    "NaN when nobody answers": (
        broken(combine=lambda logits, mask: jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))),
        "combine must return weights",
    ),
    "an infinite gradient": (
        losing(lambda scores: jnp.sqrt(jnp.sum(scores.logits[0] * 0))),
        "gradient of its weights and aux_loss is NaN or infinite",
    ),
    "a Linen module's scores in one piece": (
        router_from_linen(lambda: OnePiece(), (2, 3), name="mine"),
        r"grid \(2, 3\) must return these widths, got \(6,\)",
    ),
    "functions that cannot be told apart": (broken(combine=Unhashable()), "must be hashable"),
    "a vector of losses": (losing(lambda scores: jnp.zeros(3)), "aux_loss must return a scalar"),
    "an infinite loss": (losing(lambda scores: jnp.inf), "aux_loss must be finite"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_and_named(mistake: str) -> None:
    """Whatever is wrong with a router, the error names the router and the mistake."""
    router, message = MISTAKES[mistake]
    with pytest.raises(RouterError, match=message) as caught:
        check_router(router, GRID, 8)
    assert "'mine'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sound_router_passes_where_there_is_one_expert() -> None:
    """Nobody can be dead there, and k is 1. Other grids: test_router_conformance."""
    check_router(product_key((1,)), (1,), 8)


def test_something_else_than_a_router_for_the_grid_is_named() -> None:
    """A factory that was not called is likely; of a router for another grid the message has both grids."""
    with pytest.raises(RouterError, match="expected a Router, got function"):
        check_router(product_key, GRID, 8)
    with pytest.raises(RouterError, match=r"'product_key' is for grid \(2, 3\), the model's grid is \(4, 4\)"):
        check_router(SOUND, (4, 4))


def test_finite_scores_and_minus_infinity_are_numbers() -> None:
    """-inf means never to choose an expert; NaN anywhere is an error with its place."""
    check_finite(SOUND, (np.array([[0.0, -np.inf]]),), "layer0")
    with pytest.raises(RouterError, match="1 of 2 scores in layer3 are NaN"):
        check_finite(SOUND, (np.array([[0.0, np.nan]]),), "layer3")


def test_scores_have_one_form_whatever_a_router_returns() -> None:
    """A tuple by dimension, one flat array and `Scores` are taken; extras stay."""
    flat, extras = jnp.zeros((3, 6)), {"noise": jnp.ones(2)}
    assert as_scores(flat, GRID, 3).logits == (flat,)
    assert as_scores(list(THREE), GRID, 3).logits == THREE
    assert as_scores(Scores(THREE, extras), GRID, 3).extras is extras
    params = SOUND.init(jax.random.key(0), 8)
    assert isinstance(score(SOUND, params, jnp.ones((3, 8))), Scores)
