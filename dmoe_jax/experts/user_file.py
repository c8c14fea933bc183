"""Objects out of a user's own Python file, named as "path/to/file.py:attribute".

The file is run, with all the rights of the process: it is the user's own, named on their own command line. Never load a
path that came from the network, or that only a run's folder names (see `training.prepared_run.check_code`).
"""

import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import optax

from dmoe_jax.experts.base import Expert
from dmoe_jax.experts.check import ExpertError, check_expert

Kind = Literal["router", "expert", "optimizer", "model"]


class UserFileError(ValueError):
    """An object cannot be had from the user's file. The message names it and says why."""


def load_from_file(spec: str, *, kind: Kind, choices: Sequence[str] = ()) -> Any:
    """Return the attribute that a file defines. A file is run once a process; later changes to it have no effect.

    Args:
      spec: "path/to/file.py:attribute".
      kind, choices: kind of the attribute, and names that the caller understands in place of a file, for messages.

    Raises:
      UserFileError: there is no such file or attribute, or the file raised an exception.
    """
    path, _, attribute = spec.rpartition(":")
    if not path.endswith(".py") or not attribute:
        known = f"one of {', '.join(choices)}, or " if choices else ""
        raise UserFileError(f"{kind} {spec!r}: expected {known}'path/to/file.py:attribute'")
    resolved = Path(path).expanduser().resolve()
    if not resolved.is_file():
        raise UserFileError(f"{kind} {spec!r}: there is no file {resolved}")
    try:
        names = vars(_run_file(resolved))
    except (Exception, SystemExit) as error:  # a stranger's code may raise anything
        raise UserFileError(f"{kind} {spec!r}: importing {resolved} raised {type(error).__name__}: {error}") from error
    if attribute not in names:
        public = ", ".join(sorted(name for name in names if not name.startswith("_")))
        raise UserFileError(f"{kind} {spec!r}: {resolved} defines no {attribute!r}; it defines {public or 'nothing'}")
    return names[attribute]


def call_user(spec: str, function: Callable[..., Any], *args: Any, kind: Kind) -> Any:
    """Call a function from a user's file, once for equal arguments. Raises UserFileError naming what it raised."""
    try:
        return _called_once(function, *args)
    except (Exception, SystemExit) as error:
        call = f"{spec.rpartition(':')[2]}({', '.join(map(str, args))})"
        raise UserFileError(f"{kind} {spec!r}: {call} raised {type(error).__name__}: {error}") from error


def user_expert(spec: str) -> Expert:
    """Return the expert of "path/to/file.py:attribute": an `Expert`, or a function without arguments that returns one.
    Raises UserFileError if there is none, or it does not keep to the contract of experts (`check_expert`)."""
    found: Expert = _found_or_made(spec, "expert", Expert, "an Expert (see dmoe_jax.experts.as_expert)")
    try:
        check_expert(found)
    except ExpertError as error:
        raise UserFileError(f"expert {spec!r}: {error}") from error
    return found


def user_optimizer(spec: str) -> optax.GradientTransformation:
    """Return the optimiser of "path/to/file.py:attribute": an Optax transformation, or a function without arguments
    that returns one. Raises UserFileError if there is none."""
    kinds = optax.GradientTransformation | optax.MultiSteps
    found = _found_or_made(spec, "optimizer", kinds, "an optax.GradientTransformation")
    return found.gradient_transformation() if isinstance(found, optax.MultiSteps) else found


def user_model(spec: str) -> Callable[[Any], Any]:
    """Return the function `model(swarm)` of "path/to/file.py:attribute", which makes a `dmoe_jax.model.Model`. Raises
    UserFileError if there is none."""
    found = load_from_file(spec, kind="model")
    if not callable(found):
        raise _not_a("a function of the swarm that returns a Model, or a class like that", found, "model", spec)
    return found


@functools.cache
def _called_once(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _found_or_made(spec: str, kind: Kind, wanted: Any, expected: str) -> Any:
    """Return what the file defines, or what it makes where it is a function and none of the `wanted` types."""
    found = load_from_file(spec, kind=kind)
    if not isinstance(found, wanted) and callable(found):
        found = call_user(spec, found, kind=kind)
    if not isinstance(found, wanted):
        raise _not_a(expected, found, kind, spec)
    return found


def _not_a(expected: str, found: Any, kind: Kind, spec: str) -> UserFileError:
    return UserFileError(f"{kind} {spec!r}: expected {expected}, got {type(found).__name__}: {found!r:.200}")


@functools.cache
def _run_file(path: Path) -> ModuleType:
    # A name of its own: no module of the program can be replaced, and two files of the same name do not meet.
    name = f"dmoe_jax_user_file_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path  # the name ends in .py
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module while it runs
    if (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)  # modules beside it are found, as in a script, and hide none of the program's
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
