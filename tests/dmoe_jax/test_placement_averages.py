"""Averages of copies without a network: what is averaged, how much each copy counts, and who averages with whom."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.placement.averager import add_average
from dmoe_jax.placement.copies import LEAST_WEIGHT, CopyLayout, Progress
from dmoe_jax.placement.rounds import bundles_of, group_of, next_round, unweighted, weighted
from dmoe_net.identity import Address, Contact, PeerId

RNG = random.Random(0)
HOSTS = [Contact(PeerId.draw(RNG), Address("10.0.0.1", 3000 + n)) for n in range(3)]


def state(*values: float, count: int = 0) -> dict[str, Any]:
    """State of an expert with two parameters and Adam: parameters, first and second moments."""
    w, m, v = (np.full(2, value, np.float32) for value in values)
    return {"params": {"w": w}, "opt_state": {"m": m, "v": v, "count": np.int32(count)}}


def test_parameters_take_the_difference_and_moments_the_average() -> None:
    """Sent 1, 2, 3; the average is 2, 4, 1; meanwhile parameters went to 1.5: 1.5 + (2 - 1) = 2.5. A second moment is
    never below zero, as 0.5 + (1 - 3) would be. Counts stay."""
    sent, now, average = state(1, 2, 3, count=5), state(1.5, 2.5, 0.5, count=7), state(2, 4, 1, count=9)
    layout = CopyLayout(sent)
    assert layout.size == 6
    new = layout.with_average(now, layout.vector(sent), layout.vector(average))
    jax.tree.map(np.testing.assert_array_equal, new, state(2.5, 4, 1, count=7))
    for broken in (np.nan, np.inf):
        vector = layout.vector(average)
        vector[3] = broken
        assert layout.with_average(now, layout.vector(sent), vector) is None
    assert layout.with_average(state(np.nan, 0, 0), layout.vector(sent), layout.vector(average)) is None


@pytest.mark.parametrize("optimizer", [optax.adam(1e-2), optax.sgd(0.1), None], ids=["adam", "sgd", "frozen"])
def test_an_average_enters_an_expert_between_two_batches(optimizer: optax.GradientTransformation | None) -> None:
    """Two copies that learnt different things meet in the weighted mean; what one learns meanwhile stays."""
    expert = feedforward(d_model=4)
    one, other = (ExpertBackend(expert, optimizer, expert.init(jax.random.key(0))) for _ in range(2))
    rng = np.random.default_rng(0)

    def learn(backend: ExpertBackend) -> None:
        backend.backward([rng.normal(size=(3, 4)).astype(np.float32)], rng.normal(size=(3, 4)).astype(np.float32))

    for backend in (one, one, one, other):
        learn(backend)
    layout = CopyLayout(one.state)
    sent = [layout.vector(backend.state) for backend in (one, other)]
    (mean,) = unweighted(np.mean([weighted([sent[0]], [3.0]), weighted([sent[1]], [1.0])], axis=0), [layout.size])
    assert mean is not None
    np.testing.assert_allclose(mean, 0.75 * sent[0] + 0.25 * sent[1], atol=1e-6)
    learn(other)
    moved = jax.tree.map(np.array, other.params)
    assert add_average(one, layout, sent[0], mean)
    assert add_average(other, layout, sent[1], mean)
    expected = layout.with_average({**other.state, "params": moved}, sent[1], mean)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), other.state["params"], expected["params"])
    np.testing.assert_allclose(layout.vector(one.state), mean, atol=1e-6)
    assert one.update_count == (3 if optimizer else 0)
    assert not add_average(one, layout, sent[0], np.full_like(mean, np.inf))
    np.testing.assert_allclose(layout.vector(one.state), mean, atol=1e-6)
    learn(one)  # it learns on: types and layout are what the programs know


def test_bfloat16_stays_bfloat16() -> None:
    """An average of float32 becomes what the expert has."""
    tree = {"params": {"w": jnp.ones(3, jnp.bfloat16)}, "opt_state": ()}
    layout = CopyLayout(tree)
    assert layout.vector(tree).dtype == np.float32
    new = layout.with_average(tree, layout.vector(tree), np.full(3, 2.0, np.float32))
    np.testing.assert_array_equal(new["params"]["w"], [2, 2, 2])


def test_a_copy_counts_as_what_it_has_learnt_since_all_were_the_same() -> None:
    """From a seed as all of it, from another's state as what came after; one that is behind counts nearly nothing."""
    seeded, newcomer, behind = Progress(), Progress(), Progress()
    assert seeded.weight(0) == LEAST_WEIGHT
    assert seeded.weight(500) == 500
    newcomer.took(500)
    seeded.gave(500)
    assert (newcomer.weight(507), seeded.weight(520)) == (7, 20)
    behind.missed()
    assert behind.weight(40) == LEAST_WEIGHT
    behind.averaged(40)
    assert behind.weight(42) == 2
    seeded.averaged(520)
    seeded.gave(530)  # to a third one: those that average with it already know less of it
    assert seeded.weight(530) == 10


def test_a_copy_that_is_not_finite_spoils_no_others() -> None:
    """It counts nothing in the mean; where none counts there is no mean."""
    sound, broken = np.array([1, 2], np.float32), np.array([np.nan, 2], np.float32)
    mean = np.mean([weighted([sound, broken], [2.0, 1.0]), weighted([broken, broken], [2.0, 1.0])], axis=0)
    first, second = unweighted(mean, [2, 2])
    np.testing.assert_array_equal(first, sound)
    assert second is None


def test_bundles_are_of_the_same_nodes_and_bounded() -> None:
    """In the order of names; experts that nobody else serves are left out, and one too large is alone."""
    ab, abc = frozenset(HOSTS[:2]), frozenset(HOSTS[:3])
    members = {"e.3": ab, "e.1": ab, "e.2": abc, "e.4": ab, "e.5": frozenset(HOSTS[:1]), "e.6": ab}
    sizes = {"e.1": 4, "e.2": 4, "e.3": 4, "e.4": 4, "e.5": 4, "e.6": 99}
    bundles = bundles_of(members, sizes, max_size=8)
    assert [bundle.uids for bundle in bundles] == [("e.1", "e.3"), ("e.2",), ("e.4",), ("e.6",)]
    assert set(bundles[1].members) == abc
    assert list(bundles[0].members) == sorted(ab, key=lambda each: each.peer_id)


def test_those_who_see_the_same_find_the_same_group() -> None:
    """Another round, swarm, expert, shape or member is another group."""
    (bundle,) = bundles_of({"e.1": frozenset(HOSTS[:2])}, {"e.1": 4})
    (same,) = bundles_of({"e.1": frozenset(reversed(HOSTS[:2]))}, {"e.1": 4})
    (larger,) = bundles_of({"e.1": frozenset(HOSTS[:3])}, {"e.1": 4})
    group = group_of(bundle, swarm="s", round_number=1, schemas=["w"])
    assert group == group_of(same, swarm="s", round_number=1, schemas=["w"])
    others = [(bundle, "s", 2, "w"), (bundle, "t", 1, "w"), (bundle, "s", 1, "v"), (larger, "s", 1, "w")]
    ids = {group_of(each, swarm=swarm, round_number=n, schemas=[schema]).group_id for each, swarm, n, schema in others}
    assert len(ids - {group.group_id}) == 4
    assert sorted(group.slots) == [0, 1]
    assert next_round(61.0, 30.0) == (3, 90.0)
    assert next_round(90.0, 30.0) == (4, 120.0)
