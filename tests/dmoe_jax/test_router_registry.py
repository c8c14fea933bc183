"""Routers by name; routers, experts, optimisers and models out of users' files."""

import sys

import jax
import jax.numpy as jnp
import optax
import pytest

from dmoe_jax.experts.user_file import UserFileError, load_from_file, user_expert, user_model, user_optimizer
from dmoe_jax.routing import ROUTERS, RouterError, balanced, make_router, product_key, switch, with_balancing_loss
from dmoe_jax.routing.base import router_loss, score

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
import numpy as np, optax
from flax import linen as nn
from dmoe_jax.experts import as_expert
from dmoe_jax.routing import flat_top_k, product_key

@dataclass
class Settings:
    scale: float = 0.5

runs = []
runs.append(1)
fixed = product_key((2, 3))
ready = as_expert(nn.Dense(3), np.zeros((1, 3)), check=False)
mixes_rows = as_expert((lambda key: {}, lambda params, x: x - x.mean(0)), np.zeros((1, 3)), check=False)
sgd = optax.sgd(0.1)

def router(grid_size):
    return flat_top_k(grid_size, init_scale=Settings().scale)._replace(name="mine")

def fails(*grid_size):
    raise KeyError("gone")

def wrong_type(grid_size):
    return "a string"

def wrong_grid(grid_size):
    return product_key((7,))

def made():
    return as_expert(nn.Dense(4), np.zeros((1, 3)))

def every_second():
    return optax.MultiSteps(optax.sgd(0.1), 2)

def model(swarm):
    return f"a model of {swarm}"
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


@pytest.mark.parametrize("name", ROUTERS)
def test_names_are_the_routers_names(name):
    """A router has the same name in figures as on the command line."""
    router = make_router(name, (2, 3))
    assert (router.name, router.grid_size) == (name, (2, 3))


def test_balance_is_a_suffix():
    """The names that the combinators give, over any router."""
    assert make_router("product_key+balanced", (2, 3)) is balanced(product_key((2, 3)))
    both = make_router("switch+balance+balanced", (2, 3))
    assert both is balanced(with_balancing_loss(switch((2, 3))))
    assert both.name == "switch+balance+balanced"


def test_a_suffix_takes_a_number():
    """The bias's speed or the loss's weight is part of the name then."""
    router, plain = make_router("switch+balance=0.5", (2, 3)), switch((2, 3))
    assert router is make_router("switch+balance=0.50", (2, 3))
    assert router.name == "switch+balance=0.5"
    params, x = router.init(jax.random.key(0), 4), jnp.ones((5, 4))

    def loss(router):
        scores = score(router, params, x)
        return router_loss(router, scores, jnp.zeros((5, 1, 2), jnp.int32), jnp.ones((5, 1), bool))

    assert loss(router) == loss(with_balancing_loss(plain, 0.5)) != loss(plain)
    assert make_router("product_key+balanced=0.02", (2, 3)).name == "product_key+balanced=0.02"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("swich", r"unknown router 'swich'.*product_key.*uniform_random.*file.py:attribute"),
        ("switch+even", r"unknown router 'switch\+even'.*\+balanced or \+balance"),
        ("switch+balance=much", r"\+balance=much: expected a number behind the =, got 'much'"),
        ("product_key+balanced=-1", r"\+balanced=-1: speed must be positive"),
        ("deepseek_v3+balanced", "router 'deepseek_v3' balances its load already"),
        *((spec, f"'{spec}': expected 'path/to/file.py:attr") for spec in ("some.py", "some.py:", "some.txt:r", ":r")),
    ],
)
def test_what_names_no_router_is_answered(spec, message):
    """All known names are told, and how to name a file; a second bias is refused."""
    with pytest.raises(ValueError, match=message):
        make_router(spec, (2, 3))


def test_a_file_may_hold_a_router_or_a_function_of_the_grid(path, monkeypatch):
    """Both load, by whatever path the same object, of which the function is given the grid; the file runs once."""
    assert make_router(f"{path}:fixed", (2, 3)) is product_key((2, 3))
    router = make_router(f"{path}:router", (4, 5))
    assert (router.name, router.grid_size) == ("mine", (4, 5))
    monkeypatch.chdir(path.parent)
    assert make_router("mine.py:router", (4, 5)) is router
    assert make_router("./mine.py:router", (4, 6)) is not router
    modules = [module for module in sys.modules.values() if getattr(module, "__file__", None) == str(path.resolve())]
    assert [module.runs for module in modules] == [[1]]


def test_files_of_the_same_name_do_not_meet(tmp_path):
    """A file called like a module of the program does not replace it, either."""
    json, names = sys.modules["json"], []
    for number in (1, 2):
        file = tmp_path / str(number) / "json.py"
        file.parent.mkdir()
        file.write_text(f"from dmoe_jax.routing import product_key\nr = product_key((5,))._replace(name='{number}')\n")
        names.append(make_router(f"{file}:r", (5,)).name)
    assert names == ["1", "2"]
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
def test_what_is_wrong_with_an_attribute_is_said(path, attribute, message):
    """One sentence that begins with the spec says it, each time it is asked for."""
    for _ in range(2):
        with pytest.raises(RouterError, match=f"^router '{path}:{attribute}': .*{message}"):
            make_router(f"{path}:{attribute}", (2, 4))


def test_what_is_wrong_with_a_file_is_said(tmp_path):
    """No such file, no attribute, an exception while it is imported; nothing of it stays behind."""
    with pytest.raises(RouterError, match=r"absent.py:r': there is no file .*absent.py"):
        make_router(f"{tmp_path}/absent.py:r", (2,))
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
    dense = "router_from_linen(lambda: nn.Dense(sum(grid)), grid"
    (tmp_path / "gates.py").write_text(
        "from flax import linen as nn\nfrom dmoe_jax.routing import router_from_linen\n"
        f"def one(grid):\n    return {dense})\ndef two(grid):\n    return {dense})\n"
        f"def three(grid):\n    return {dense}, name='mine')\n"
    )
    names = [make_router(f"{tmp_path}/gates.py:{which}", (2, 3)).name for which in ("one", "two", "three")]
    assert names == ["gates.py:one", "gates.py:two", "mine"]


def test_experts_and_optimisers_are_objects_or_functions_that_make_them(path, monkeypatch):
    """By whatever path they are named they are the same objects; a MultiSteps counts as an optimiser."""
    assert user_expert(f"{path}:ready").output.shape == (3,)
    made = user_expert(f"{path}:made")
    assert made.output.shape == (4,)
    monkeypatch.chdir(path.parent)
    assert user_expert("mine.py:made") is made
    assert user_optimizer(f"{path}:sgd") is load_from_file(f"{path}:sgd", kind="optimizer")
    made = user_optimizer(f"{path}:every_second")
    assert isinstance(made, optax.GradientTransformation)
    assert user_optimizer(f"{path}:every_second") == made
    assert user_model(f"{path}:model")("the swarm") == "a model of the swarm"  # it was not called while it was loaded


@pytest.mark.parametrize(
    ("load", "attribute", "message"),
    [
        (user_expert, "sgd", "expert '.*': expected an Expert .*got .*GradientTransformation"),
        (user_expert, "fails", r"expert '.*': fails\(\) raised KeyError: 'gone'"),
        (user_expert, "mixes_rows", "expert '.*': .* rows must be independent"),
        (user_expert, "absent", "expert '.*': .* defines no 'absent'; it defines .*every_second"),
        (user_optimizer, "ready", r"optimizer '.*': (ready\(\) raised|expected an optax.GradientTransformation)"),
        (user_optimizer, "made", "optimizer '.*': expected an optax.GradientTransformation, got Expert"),
        (user_model, "sgd", "model '.*': expected a function of the swarm"),
    ],
)
def test_what_does_not_fit_is_said(path, load, attribute, message):
    """The sentence names what was asked for, what was expected and what there is."""
    with pytest.raises(UserFileError, match=message):
        load(f"{path}:{attribute}")


def test_a_bare_name_is_answered_with_the_choices():
    """The error lists the names that the caller knows, and the way to name a file."""
    with pytest.raises(UserFileError, match=r"^optimizer 'sgdm': expected one of adam, lion, or 'path/to/file.py:"):
        load_from_file("sgdm", kind="optimizer", choices=("adam", "lion"))
    with pytest.raises(UserFileError, match=r"^expert 'mine.py': expected 'path/to/file.py:attribute'"):
        user_expert("mine.py")
