"""A router out of a user's own Python file: "path/to/file.py:attribute".

The file is run, with all the rights of the process: it is the user's own, named on their own command line. Never load a
path that came from the network.
"""

import functools
import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from dmoe_jax.routing.base import Router, RouterError
from dmoe_jax.routing.check import check_router


def load_router(spec: str, grid_size: tuple[int, ...]) -> Router:
    """The router that a file defines, for this grid.

    A file is run once a process, and the same file, attribute and grid give the same object. Changes made to the file
    later have no effect.

    Args:
      spec: "path/to/file.py:attribute", the attribute a Router, or a function from grid_size to a Router.
      grid_size: extent of each dimension of the expert grid.

    Raises:
      RouterError: naming the spec: no such file or attribute, an exception in the user's code, something that is not
        a router, a router for another grid.
    """
    path, _, attribute = spec.rpartition(":")
    if not path.endswith(".py") or not attribute:
        raise RouterError(f"router {spec!r}: expected 'path/to/file.py:attribute'")
    try:
        resolved = Path(path).expanduser().resolve()
        if not resolved.is_file():
            raise RouterError(f"router {spec!r}: there is no file {resolved}")
        return _load_router(resolved, attribute, grid_size)
    except _UserError as error:
        raise RouterError(f"router {spec!r}: {error}") from error.__cause__


class _UserError(Exception):
    """What is wrong with the user's file, to be told together with the spec."""


# The two caches hold what one process was told to load: an entry for each file and grid on its command line. What
# raises is not kept.
@functools.cache
def _load_router(path: Path, attribute: str, grid_size: tuple[int, ...]) -> Router:
    names = vars(_run_file(path))
    if attribute not in names:
        public = sorted(name for name in names if not name.startswith("_"))
        raise _UserError(f"{path} defines no {attribute!r}; it defines {', '.join(public) or 'nothing'}")
    found = names[attribute]
    if not isinstance(found, Router) and callable(found):
        try:
            found = found(grid_size)
        except (Exception, SystemExit) as error:  # a stranger's code may raise anything
            raise _UserError(f"{attribute}({grid_size}) raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Router):
        raise _UserError(f"expected a Router, got {type(found).__name__}: {found!r}")
    try:
        check_router(found, grid_size)
    except RouterError as error:
        raise _UserError(str(error)) from error
    return found


@functools.cache
def _run_file(path: Path) -> ModuleType:
    # A name of its own: no module of the program can be replaced, and two files of the same name do not meet.
    name = f"dmoe_jax_user_file_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path  # the name ends in .py
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module while it runs
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _UserError(f"importing {path} raised {type(error).__name__}: {error}") from error
    return module
