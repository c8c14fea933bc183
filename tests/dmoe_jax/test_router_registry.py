"""Routers by name and out of users' files."""

import sys

import jax
import jax.numpy as jnp
import pytest

from dmoe_jax.routing import (
    ROUTERS,
    Router,
    RouterError,
    balanced,
    make_router,
    product_key,
    switch,
    with_balancing_loss,
)
from dmoe_jax.routing.base import router_loss, score

GOOD = """
from __future__ import annotations
from dataclasses import dataclass
from dmoe_jax.routing import flat_top_k, product_key

@dataclass
class Settings:
    scale: float = 0.5

runs = []
runs.append(1)
fixed = product_key((2, 3))

def router(grid_size):
    return flat_top_k(grid_size, init_scale=Settings().scale)._replace(name="mine")

def fails(grid_size):
    raise KeyError("gone")

def wrong_type(grid_size):
    return "a string"

def wrong_grid(grid_size):
    return product_key((7,))
"""


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.py"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize("name", ROUTERS)
def test_names_are_the_routers_names(name):
    """A router has the same name in figures as on the command line."""
    router = make_router(name, (2, 3))
    assert router.name == name
    assert router.grid_size == (2, 3)


def test_balance_is_a_suffix():
    """The names that the combinators give, over any router; a second bias or an unknown suffix is refused."""
    assert make_router("product_key+balanced", (2, 3)) is balanced(product_key((2, 3)))
    both = make_router("switch+balance+balanced", (2, 3))
    assert both is balanced(with_balancing_loss(switch((2, 3))))
    assert both.name == "switch+balance+balanced"
    with pytest.raises(ValueError, match="router 'deepseek_v3' balances its load already"):
        make_router("deepseek_v3+balanced", (2, 3))
    with pytest.raises(RouterError, match=r"unknown router 'switch\+even'.*\+balanced or \+balance"):
        make_router("switch+even", (2, 3))


def test_a_suffix_takes_a_number():
    """The bias's speed or the loss's weight, which then is part of the name; a number that will not do is named."""
    router = make_router("switch+balance=0.5", (2, 3))
    assert router is make_router("switch+balance=0.50", (2, 3))
    assert router.name == "switch+balance=0.5"
    params = router.init(jax.random.key(0), 4)
    x = jnp.ones((5, 4))
    given = jnp.zeros((5, 1, 2), jnp.int32), jnp.ones((5, 1), bool)
    loss, wanted = (
        router_loss(each, score(each, params, x), *given) for each in (router, with_balancing_loss(switch((2, 3)), 0.5))
    )
    assert loss == wanted != router_loss(switch((2, 3)), score(switch((2, 3)), params, x), *given)
    assert make_router("product_key+balanced=0.02", (2, 3)).name == "product_key+balanced=0.02"
    with pytest.raises(RouterError, match=r"\+balance=much: expected a number behind the =, got 'much'"):
        make_router("switch+balance=much", (2, 3))
    with pytest.raises(RouterError, match=r"\+balanced=-1: speed must be positive"):
        make_router("product_key+balanced=-1", (2, 3))


def test_an_unknown_name_is_answered_with_the_known_ones():
    """All of them, and how to name a file."""
    with pytest.raises(RouterError, match=r"unknown router 'swich'.*product_key.*uniform_random.*file.py:attribute"):
        make_router("swich", (2, 3))


def test_a_file_may_hold_a_router_or_a_function_of_the_grid(good):
    """Both load; the function is given the grid."""
    assert make_router(f"{good}:fixed", (2, 3)) is product_key((2, 3))
    router = make_router(f"{good}:router", (4, 5))
    assert isinstance(router, Router)
    assert (router.name, router.grid_size) == ("mine", (4, 5))


def test_loading_twice_gives_the_same_object(good, monkeypatch):
    """By whatever path; the file runs once. Another grid is another router."""
    router = make_router(f"{good}:router", (4, 5))
    monkeypatch.chdir(good.parent)
    assert make_router("good.py:router", (4, 5)) is router
    assert make_router("./good.py:router", (4, 6)) is not router
    modules = [module for module in sys.modules.values() if getattr(module, "__file__", None) == str(good.resolve())]
    assert [module.runs for module in modules] == [[1]]


def test_files_of_the_same_name_do_not_meet(tmp_path):
    """Nor does a file called like a module of the program replace it."""
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "json.py").write_text(
            f"from dmoe_jax.routing import product_key\nr = product_key((5,))._replace(name='number {number}')\n"
        )
    json = sys.modules["json"]
    names = [make_router(f"{tmp_path}/{number}/json.py:r", (5,)).name for number in (1, 2)]
    assert names == ["number 1", "number 2"]
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("missing", "defines no 'missing'; it defines .*fixed"),
        ("fails", r"fails\(\(2, 4\)\) raised KeyError: 'gone'"),
        ("wrong_type", "expected a Router, got str"),
        ("runs", "expected a Router, got list"),
        ("wrong_grid", r"router 'product_key' is for grid \(7,\)"),
        ("fixed", r"router 'product_key' is for grid \(2, 3\)"),
    ],
)
def test_what_is_wrong_with_an_attribute_is_said(good, attribute, message):
    """In one sentence that begins with the spec, each time it is asked for."""
    for _ in range(2):
        with pytest.raises(RouterError, match=f"^router '{good}:{attribute}': .*{message}"):
            make_router(f"{good}:{attribute}", (2, 4))


def test_what_is_wrong_with_a_file_is_said(tmp_path):
    """No such file, no attribute, an exception while it is imported; nothing of it stays behind."""
    with pytest.raises(RouterError, match=r"absent.py:r': there is no file .*absent.py"):
        make_router(f"{tmp_path}/absent.py:r", (2,))
    for spec in ("some.py", "some.py:", "some.txt:r", ":r"):
        with pytest.raises(RouterError, match=f"router '{spec}': expected 'path/to/file.py:attribute'"):
            make_router(spec, (2,))
    broken = tmp_path / "broken.py"
    for source, error in (("1 / 0", "ZeroDivisionError: division by zero"), ("def f(:", "SyntaxError: ")):
        broken.write_text(source)
        before = set(sys.modules)
        with pytest.raises(RouterError, match=f"broken.py:r': importing .* raised {error}") as caught:
            make_router(f"{broken}:r", (2,))
        assert isinstance(caught.value.__cause__, ZeroDivisionError | SyntaxError)
        assert not {name for name in set(sys.modules) - before if name.startswith("dmoe_jax_user_file")}
    broken.write_text("from dmoe_jax.routing import product_key\nr = product_key((2,))\n")
    assert make_router(f"{broken}:r", (2,)) is product_key((2,))  # mended: what raised was not kept


def test_own_routers_without_a_name_are_named_after_their_file(tmp_path):
    """Two of them must not share a line in a figure; a name that the author gave stays."""
    (tmp_path / "gates.py").write_text(
        "from flax import linen as nn\nfrom dmoe_jax.routing import router_from_linen\n"
        "def one(grid):\n    return router_from_linen(lambda: nn.Dense(sum(grid)), grid)\n"
        "def two(grid):\n    return router_from_linen(lambda: nn.Dense(sum(grid)), grid)\n"
        "def three(grid):\n    return router_from_linen(lambda: nn.Dense(sum(grid)), grid, name='mine')\n"
    )
    names = [make_router(f"{tmp_path}/gates.py:{which}", (2, 3)).name for which in ("one", "two", "three")]
    assert names == ["gates.py:one", "gates.py:two", "mine"]
