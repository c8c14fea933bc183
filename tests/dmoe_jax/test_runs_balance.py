"""How evenly experts were used: numbers derived by hand, and what holds for any load."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmoe_jax.runs.balance import Balance, balance, layer_balances, mean_balance

LAYERS = {"layer0": ("layer0.0.0", "layer0.1.0"), "layer1": ("layer1.0.0", "layer1.1.0")}
UIDS = ("a.0", "a.1", "a.2", "a.3")


@pytest.mark.parametrize(
    ("load", "cv", "entropy", "dead"),
    [
        ((5, 5, 5, 5), 0.0, 1.0, 0),
        # Mean 1, deviations 3, -1, -1, -1: sqrt((9 + 1 + 1 + 1) / 4) = sqrt(3).
        ((4, 0, 0, 0), math.sqrt(3), 0.0, 3),
        # Two of four share everything: log 2 / log 4; deviations are all 1 around the mean 1.
        ((2, 2, 0, 0), 1.0, 0.5, 2),
        # Mean 2, deviations 4, -1, -1, -2: sqrt(22 / 4) / 2; -(3/4 ln 3/4 + 2/8 ln 1/8) / ln 4.
        ((6, 1, 1, 0), math.sqrt(5.5) / 2, -(0.75 * math.log(0.75) + 0.25 * math.log(0.125)) / math.log(4), 1),
    ],
)
def test_balance_by_hand(load: tuple[int, ...], cv: float, entropy: float, dead: int) -> None:
    """Coefficient of variation, normalised entropy and dead experts of small loads."""
    found = balance(dict(zip(UIDS, load, strict=True)), UIDS)
    assert found.histogram == load
    assert found.cv == pytest.approx(cv)
    assert found.entropy == pytest.approx(entropy)
    assert math.copysign(1.0, found.entropy or 0.0) == 1.0
    assert found.dead == dead


def test_balance_of_a_window() -> None:
    """What counts is the growth; experts that were never called count 0, those of other layers not at all."""
    before = {"a.0": 10, "a.1": 3}
    load = {"a.0": 10, "a.1": 7, "a.2": 4, "b.0": 99}
    found = balance(load, UIDS, before=before, ok=6, failed=2)
    assert found == Balance(histogram=(0, 4, 4, 0), cv=1.0, entropy=0.5, dead=2, share_lost=0.25)


def test_nothing_happened() -> None:
    """Without a sample or a call there is no figure, and every expert is dead."""
    expected = Balance(histogram=(0, 0, 0, 0), cv=None, entropy=None, dead=4, share_lost=None)
    assert balance({"a.0": 5}, UIDS, before={"a.0": 5}) == expected
    assert balance({"a.0": 5}, ["a.0"], failed=3) == Balance(
        histogram=(5,), cv=0.0, entropy=1.0, dead=0, share_lost=1.0
    )


def test_mistakes_are_named() -> None:
    """No expert, negative calls, a load that fell, an expert that the model does not have."""
    with pytest.raises(ValueError, match=r"uids.*none"):
        balance({}, [])
    with pytest.raises(ValueError, match="failed=-1"):
        balance({}, UIDS, failed=-1)
    with pytest.raises(ValueError, match=r"a\.2 fell by 3"):
        balance({"a.2": 1}, UIDS, before={"a.2": 4})
    with pytest.raises(ValueError, match=r"layers layer0, layer1 have no expert 'layer0.0.1'"):
        layer_balances({"layer0.0.1": 1}, LAYERS)


def test_layers_by_hand() -> None:
    """Each layer's own load with everybody's calls; the mean of layers leaves out what is not known."""
    load, before = {"layer0.0.0": 9, "layer0.1.0": 4}, {"layer0.0.0": 6, "layer0.1.0": 3}
    layers = layer_balances(load, LAYERS, before=before, ok=3, failed=1)
    assert list(layers) == ["layer0", "layer1"]
    assert layers["layer0"].histogram == (3, 1)
    assert layers["layer0"].cv == pytest.approx(0.5)
    assert layers["layer1"].histogram == (0, 0)
    means = mean_balance(layers.values())
    assert means == {
        "load_cv": pytest.approx(0.5),
        "load_entropy": layers["layer0"].entropy,
        "dead_experts": 2,
        "share_lost": 0.25,
    }
    assert mean_balance([]) == {"load_cv": None, "load_entropy": None, "dead_experts": 0, "share_lost": None}


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=64).filter(any), st.integers(2, 1000), st.randoms())
def test_balance_of_any_load(samples: list[int], factor: int, rng: random.Random) -> None:
    """Figures stay in their ranges; neither the order of experts nor the number of samples matters, only shares."""
    uids = [f"a.{index}" for index in range(len(samples))]
    found = balance(dict(zip(uids, samples, strict=True)), uids)
    assert found.cv is not None
    assert found.entropy is not None
    assert 0 <= found.cv <= math.sqrt(len(samples) - 1) * (1 + 1e-12)
    assert 0 <= found.entropy <= 1
    assert found.dead == samples.count(0)
    shuffled = [factor * count for count in samples]
    rng.shuffle(shuffled)
    other = balance(dict(zip(uids, shuffled, strict=True)), uids)
    assert other.cv == pytest.approx(found.cv, abs=1e-9)
    assert other.entropy == pytest.approx(found.entropy, abs=1e-9)
