"""Expert choice: the selection against loops, and what it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.routing import Scores, expert_choice, gather_logits, score

GRID = (2, 2)


def brute_force(logits: np.ndarray, k: int, alive: np.ndarray) -> list[set[int]]:
    """The experts of each sample, expert by expert."""
    batch, experts = len(logits), np.flatnonzero(alive)
    whole, left_over = divmod(batch * k, max(len(experts), 1))
    taken: list[set[int]] = [set() for _ in range(batch)]
    candidates = []
    for expert in experts:
        order = sorted(range(batch), key=lambda b: (-logits[b, expert], b))
        for sample in order[:whole]:
            taken[sample].add(int(expert))
        if whole < batch:
            candidates.append((-logits[order[whole], expert], int(expert), order[whole]))
    for _, expert, sample in sorted(candidates)[:left_over]:
        taken[sample].add(expert)
    most = min(logits.shape[1], 2 * k)
    return [set(sorted(own, key=lambda e: (-logits[b, e], e))[:most]) for b, own in enumerate(taken)]


def selection(router, logits, k, alive=None) -> list[set[int]]:
    """The experts of each sample, flat, as the router selects them."""
    scores = Scores((jnp.asarray(logits, jnp.float32),))
    indices, mask = router.select(scores, k, None if alive is None else jnp.asarray(alive).reshape(router.grid_size))
    flat = np.asarray(indices[..., 0] * router.grid_size[1] + indices[..., 1])
    return [{int(cell) for cell in row[taken]} for row, taken in zip(flat, np.asarray(mask), strict=True)]


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("alive", [(1, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 0), (0, 0, 0, 0)])
def test_selection_equals_brute_force(k, alive):
    """Exactly the pairs that a loop over experts finds; with two equal scores in, too."""
    rng = np.random.default_rng(k)
    living = np.array(alive, bool)
    for _ in range(5):
        logits = rng.permutation(20).reshape(5, 4) / 8.0
        logits[1] = logits[0]
        assert selection(expert_choice(GRID), logits, k, living) == brute_force(logits, k, living)


def test_every_expert_serves_equally_many():
    """n k / e = 3 * 4 / 6 = 2 samples each, though all samples prefer the same expert."""
    logits = np.random.default_rng(0).normal(size=(4, 6)) + np.array([9, 0, 0, 0, 0, 0])
    taken = selection(expert_choice((2, 3)), logits, 3)
    assert [sum(expert in own for own in taken) for expert in range(6)] == [2] * 6


def test_the_number_of_choices_is_the_batch_times_k():
    """Also where it does not divide by the living experts: 3 samples, k = 1, 4 experts."""
    logits = np.random.default_rng(1).normal(size=(3, 4))
    assert sum(map(len, selection(expert_choice(GRID), logits, 1))) == 3


def test_one_sample_is_plain_top_k():
    """The k best living experts, as any other router would choose."""
    logits = np.array([[0.1, 0.4, 0.3, 0.2]])
    assert selection(expert_choice(GRID), logits, 2) == [{1, 2}]
    assert selection(expert_choice(GRID), logits, 2, np.array([1, 0, 1, 1], bool)) == [{2, 3}]


def test_a_sample_keeps_the_best_2k():
    """All four experts like sample 0 best; with k = 1 it keeps two of them, and nobody takes another instead."""
    logits = np.array([[4.0, 3.0, 2.0, 1.0], [0.0] * 4, [0.0] * 4, [0.0] * 4])
    assert selection(expert_choice(GRID), logits, 1) == [{0, 1}, set(), set(), set()]


def test_weights_are_the_affinities():
    """softmax over all experts of the layer, not renormalised over those that took the sample."""
    router = expert_choice(GRID)
    params, x = router.init(jax.random.key(0), 6), jax.random.normal(jax.random.key(1), (4, 6))
    scores = score(router, params, x)
    np.testing.assert_allclose(jnp.exp(scores.logits[0]).sum(axis=1), np.ones(4), rtol=1e-5)
    indices, mask = router.select(scores, 2)
    weights = router.combine(gather_logits(scores, indices, GRID), mask)
    flat = np.asarray(indices[..., 0] * 2 + indices[..., 1])
    expected = np.where(mask, np.take_along_axis(np.exp(np.asarray(scores.logits[0])), flat, axis=1), 0)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_the_future_of_the_batch_decides():
    """The docstring's warning is true: another last sample changes who serves the first."""
    logits = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]])
    before = selection(expert_choice(GRID), logits, 2)
    logits[1] = 2.0
    assert selection(expert_choice(GRID), logits, 2)[0] != before[0]
