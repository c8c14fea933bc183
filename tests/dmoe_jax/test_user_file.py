"""Experts, optimisers and models out of users' files."""

import optax
import pytest

from dmoe_jax.experts.user_file import UserFileError, load_from_file, user_expert, user_model, user_optimizer

SOURCE = """
import numpy as np
import optax
from flax import linen as nn
from dmoe_jax.experts import as_expert

ready = as_expert(nn.Dense(3), np.zeros((1, 3)))

def made():
    return as_expert(nn.Dense(4), np.zeros((1, 3)))

mixes_rows = as_expert((lambda key: {}, lambda params, x: x - x.mean(0)), np.zeros((1, 3)), check=False)
fixed = optax.sgd(0.1)

def every_second():
    return optax.MultiSteps(optax.sgd(0.1), 2)

def fails():
    raise KeyError("gone")

def model(swarm):
    return f"a model of {swarm}"
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_experts_are_objects_or_functions_that_make_them(path, monkeypatch):
    """By whatever path they are named they are the same objects: compiled code is cached by identity."""
    assert user_expert(f"{path}:ready").output.shape == (3,)
    made = user_expert(f"{path}:made")
    assert made.output.shape == (4,)
    monkeypatch.chdir(path.parent)
    assert user_expert("mine.py:made") is made


def test_optimisers_are_objects_or_functions_that_make_them(path):
    """A MultiSteps counts as one."""
    assert user_optimizer(f"{path}:fixed") is load_from_file(f"{path}:fixed", kind="optimizer")
    made = user_optimizer(f"{path}:every_second")
    assert isinstance(made, optax.GradientTransformation)
    assert user_optimizer(f"{path}:every_second") == made


def test_a_model_is_a_function_of_the_swarm(path):
    """It is not called while it is loaded: there is no swarm yet."""
    assert user_model(f"{path}:model")("the swarm") == "a model of the swarm"


@pytest.mark.parametrize(
    ("load", "attribute", "message"),
    [
        (user_expert, "fixed", "expert '.*': expected an Expert .*got .*GradientTransformation"),
        (user_expert, "fails", r"expert '.*': fails\(\) raised KeyError: 'gone'"),
        (user_expert, "mixes_rows", "expert '.*': .* rows must be independent"),
        (user_expert, "absent", "expert '.*': .* defines no 'absent'; it defines .*every_second"),
        (user_optimizer, "ready", r"optimizer '.*': (ready\(\) raised|expected an optax.GradientTransformation)"),
        (user_optimizer, "made", "optimizer '.*': expected an optax.GradientTransformation, got Expert"),
        (user_model, "fixed", "model '.*': expected a function of the swarm"),
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
