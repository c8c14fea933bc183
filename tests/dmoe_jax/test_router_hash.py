"""Routers without parameters: hashing and uniform chance."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.routing import hash_router, score, uniform_random
from dmoe_jax.routing.hash_router import sim_hash
from dmoe_jax.routing.hashing import hash_rows, hash_words, unit_interval


def mix(h: int) -> int:
    """MurmurHash3's 32-bit finaliser in Python integers."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


def number(*words: int) -> float:
    """Number that `unit_interval(hash_words(...))` should be."""
    state = 0
    for word in words:
        state = mix(((state + 0x9E3779B9) & 0xFFFFFFFF) ^ (word & 0xFFFFFFFF))
    return (state >> 8) / 2**24


def choices(router, ids, k=1, alive=None) -> np.ndarray:
    """Flat indices [batch, k] of the experts of these ids."""
    ids = jnp.asarray(ids, jnp.int32)
    scores = score(router, {}, jnp.zeros((len(ids), 1)), ids=ids)
    indices, mask = router.select(scores, k, alive)
    assert mask.all()
    return np.ravel_multi_index(tuple(np.moveaxis(np.asarray(indices), -1, 0)), router.grid_size)


def test_hash_scores_against_integers():
    """One number for each (seed, dimension, coordinate, id), negative ids and large seeds included."""
    ids = [0, 1, 33277, -5]
    scores = score(hash_router((2, 3), seed=4_000_000_000), {}, jnp.zeros((4, 1)), ids=jnp.array(ids, jnp.int32))
    for dim, part in enumerate(scores.logits):
        expected = [[number(4_000_000_000, dim, u, i) for u in range(part.shape[1])] for i in ids]
        np.testing.assert_array_equal(part, np.float32(expected))


@pytest.mark.parametrize("grid", [(16,), (4, 4)])
def test_hash_spreads_ids_evenly(grid):
    """4096 ids over 16 experts: 256 each, standard deviation 15.5; another seed, another assignment."""
    chosen = choices(hash_router(grid), range(4096))[:, 0]
    counts = np.bincount(chosen, minlength=16)
    assert np.abs(counts - 256).max() < 5 * 15.5
    other = choices(hash_router(grid, seed=1), range(4096))[:, 0]
    assert 0.02 < np.mean(chosen == other) < 0.12  # one in 16 by chance


def test_only_a_dead_experts_samples_move():
    """Rendezvous hashing: each goes to its second best, everybody else stays."""
    router = hash_router((3, 4))
    alive = np.ones((3, 4), bool)
    alive[1, 2] = False
    before, ranked = choices(router, range(300))[:, 0], choices(router, range(300), k=2)
    after = choices(router, range(300), alive=jnp.asarray(alive))[:, 0]
    moved = before == 6  # (1, 2)
    assert moved.any()
    np.testing.assert_array_equal(after[~moved], before[~moved])
    np.testing.assert_array_equal(after[moved], ranked[moved, 1])


def test_hash_ignores_features_when_it_has_ids_and_is_blind_to_scale_when_not():
    """Ids decide; without them the direction of x does."""
    router = hash_router((2, 3))
    x = jax.random.normal(jax.random.key(0), (5, 8))
    ids = jnp.arange(5, dtype=jnp.int32)
    for left, right in (
        (score(router, {}, x, ids=ids), score(router, {}, -x, ids=ids)),
        (score(router, {}, x), score(router, {}, 3 * x)),
    ):
        jax.tree.map(np.testing.assert_array_equal, left, right)
    assert not np.array_equal(score(router, {}, x).logits[1], score(router, {}, -x).logits[1])


def test_sim_hash_bits_are_signs_of_projections():
    """The opposite direction flips every bit; the share of differing bits is the angle over pi (Charikar 2002)."""
    x = jax.random.normal(jax.random.key(1), (200, 8))
    there, back = np.asarray(sim_hash(x, 3)), np.asarray(sim_hash(-x, 3))
    np.testing.assert_array_equal(there ^ back, np.full(200, 0xFFFF))
    pairs = np.array([[1.0, 0.0], [1.0, 1.0]])  # 45 degrees: a quarter of the bits, over many seeds
    bits = [
        bin(int(np.bitwise_xor(*np.asarray(sim_hash(jnp.asarray(pairs, jnp.float32), s))))).count("1")
        for s in range(60)
    ]
    assert abs(np.mean(bits) / 16 - 0.25) < 0.06  # 960 bits: standard error 0.014


def test_weights_without_a_gate_are_uniform():
    """The same for each expert that answered."""
    mask = jnp.array([[True, True, False], [True, False, False], [False, False, False]])
    expected = [[0.5, 0.5, 0], [1, 0, 0], [0, 0, 0]]
    for factory in (hash_router, uniform_random):
        np.testing.assert_array_equal(factory((3,)).combine(jnp.full((3, 3), -7.0), mask), expected)


def test_uniform_random_is_uniform_in_training():
    """2000 draws of 2 out of 6 give each expert 667, standard deviation 21; samples differ although x does not."""
    router = uniform_random((2, 3))
    scores = score(router, {}, jnp.ones((2000, 4)), key=jax.random.key(0))
    indices, _ = router.select(scores, 2)
    counts = np.bincount(np.asarray(indices[..., 0] * 3 + indices[..., 1]).reshape(-1), minlength=6)
    assert np.abs(counts - 2000 / 3).max() < 5 * 21


def test_uniform_random_follows_the_sample_in_evaluation():
    """Equal rows get equal experts wherever they stand in the batch; different rows are spread evenly."""
    router = uniform_random((6,))
    x = jax.random.normal(jax.random.key(0), (1200, 4))
    chosen = np.asarray(router.select(score(router, {}, x), 1)[0]).reshape(-1)
    mirrored = np.asarray(router.select(score(router, {}, x[::-1]), 1)[0]).reshape(-1)
    np.testing.assert_array_equal(chosen, mirrored[::-1])
    assert np.abs(np.bincount(chosen, minlength=6) - 200).max() < 5 * 13  # standard deviation 12.9


def test_hash_rows_sees_every_feature_and_their_order():
    """Another value, another order, another hash; but zero has no sign."""
    x = jnp.array([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [1.0, 2.0, 1e-30], [1.0, 2.0, -0.0]])
    hashed = [int(value) for value in hash_rows(x)]
    assert len(set(hashed[:3])) == 3
    assert hashed[3] == hashed[0]


def test_unit_interval_is_half_open():
    """The largest hash stays below 1, the smallest is 0."""
    assert unit_interval(jnp.array([0, 2**32 - 1], jnp.uint32)).tolist() == [0.0, 1 - 2**-24]


def test_order_of_words_matters():
    """hash(a, b) is not hash(b, a), and zeros count."""
    words = [jnp.uint32(0), jnp.uint32(1)]
    assert int(hash_words(*words)) != int(hash_words(*reversed(words)))
    assert int(hash_words(words[0])) != int(hash_words(words[0], words[0])) != 0


def test_hashes_are_the_same_in_another_process():
    """Nothing depends on Python's own hash seed, or on what was traced before."""
    program = (
        "import jax.numpy as jnp; from dmoe_jax.routing import hash_router, score;"
        "x = jnp.arange(12.0).reshape(3, 4) - 5.5;"
        "print([part.tolist() for part in score(hash_router((2, 3), seed=9), {}, x).logits])"
    )
    other = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    x = jnp.arange(12.0).reshape(3, 4) - 5.5
    assert other.stdout.strip() == str([part.tolist() for part in score(hash_router((2, 3), seed=9), {}, x).logits])


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_out_of_range_are_refused(seed):
    """A seed is one word of 32 bits."""
    with pytest.raises(ValueError, match=f"between 0 and .* got {seed}"):
        hash_router((2,), seed=seed)
