"""The optimiser of the ALBERT recipe: LAMB under a clipped gradient, linear warm-up and linear decay.

As ALBERT (Lan et al. 2020, section 4.1) and, for training it together, DeDLOC (Diskin et al. 2021) and Moshpit SGD
(Ryabinin et al. 2021) have it. LAMB (You et al. 2020, algorithm 2) for every array of the parameters:

    m, v = moving means of the clipped gradient and its square (0.9, 0.999), their bias corrected
    u = m / (sqrt(v) + 1e-6) + weight_decay * parameters              no decay of biases and LayerNorm gains
    parameters -= learning_rate(n) * |parameters| / |u| * u           the ratio is 1 where a norm is 0

This is `optax.lamb`, and the LAMB of DeDLOC's code. That of ALBERT's authors corrects no bias of the means and has no
ratio for biases and gains; its decay begins at update 0 and is overruled by the warm-up, where ours begins after it, as
DeDLOC's.
"""

import math
from dataclasses import dataclass

import jax
import optax

from dmoe_jax.arrays import PyTree
from dmoe_jax.machine.remembered import remembered
from dmoe_jax.optim.recipe import clip_and_decay


@dataclass(frozen=True, slots=True, kw_only=True)
class AlbertRecipe:
    """Hyperparameters of ALBERT's training. The defaults are those of ALBERT-large with batches of 4096 samples."""

    learning_rate: float = 1.76e-3
    """Peak step size."""
    warmup_steps: int = 5000
    """Updates in which it rises from 0, linearly; fewer than total_steps."""
    total_steps: int = 125_000
    """Updates after which it has come down to 0, linearly; 125,000 in Lan et al., a million in DeDLOC's code. In a
    collaboration these are its global steps."""
    weight_decay: float = 0.01
    """Times the parameters, is added to Adam's direction; not for biases and LayerNorm gains."""
    grad_clip: float = 10.0
    """Bound on the norm of the gradient, as in Moshpit SGD; Lan et al. and DeDLOC have 1. Infinite for none."""

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ValueError(
                f"warmup_steps must be at least 0 and below total_steps ({self.total_steps}), got {self.warmup_steps}"
            )
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")
        if not self.grad_clip > 0:
            raise ValueError(f"grad_clip must be positive, got {self.grad_clip}")


def albert_schedule(recipe: AlbertRecipe) -> optax.Schedule:
    """Step size by the number of updates made before."""
    decay = optax.linear_schedule(recipe.learning_rate, 0.0, recipe.total_steps - recipe.warmup_steps)
    if not recipe.warmup_steps:
        return decay
    warmup = optax.linear_schedule(0.0, recipe.learning_rate, recipe.warmup_steps)
    return optax.join_schedules([warmup, decay], [recipe.warmup_steps])


def decays(params: PyTree) -> PyTree:
    """Return a tree of bool, True for a Flax model's arrays that decay: not `bias`, nor `scale`, a LayerNorm's gain."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: getattr(path[-1], "key", None) not in ("bias", "scale"), params
    )


@remembered(64)
def albert_optimizer(recipe: AlbertRecipe = AlbertRecipe()) -> optax.GradientTransformation:
    """The recipe's optimiser; equal recipes return the same object, and so share compiled code.

    Args:
      recipe: step sizes, decay and clip.
    """
    lamb = optax.lamb(
        albert_schedule(recipe), b1=0.9, b2=0.999, eps=1e-6, weight_decay=recipe.weight_decay, mask=decays
    )
    return optax.chain(clip_and_decay(recipe.grad_clip, 0.0), lamb) if math.isfinite(recipe.grad_clip) else lamb
