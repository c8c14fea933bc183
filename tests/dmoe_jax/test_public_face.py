"""Names that `import dmoe_jax` gives, and their cost."""

import ast
import inspect
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

import dmoe_jax
import dmoe_jax.public

ROOT = Path(dmoe_jax.__file__).parent
MODULES = ["data", "emulator", "experts", "models", "optim", "routing"]


def explained_constants(package: str) -> set[str]:
    """Names to which a module of a package assigns something, with a docstring beneath."""
    bodies = [ast.parse(path.read_text()).body for path in (ROOT / package).glob("*.py")]
    return {
        ast.unparse(one.targets[0] if isinstance(one, ast.Assign) else one.target)
        for body in bodies
        for one, text in itertools.pairwise(body)
        if isinstance(one, ast.Assign | ast.AnnAssign) and ast.unparse(text).startswith(("'", '"'))
    }


def is_explained(found: object, name: str) -> bool:
    """True if something has a docstring that somebody wrote; data classes get one without."""
    text = inspect.getdoc(found) or ""
    is_own = inspect.isroutine(found) or inspect.isclass(found) or inspect.ismodule(found)
    return is_own and bool(text) and not text.startswith(f"{name}(")


def test_the_face_is_small_and_explained() -> None:
    """At most 45 names, each told by `dir` and with a docstring; others are refused by name."""
    assert len(set(dmoe_jax.__all__)) == len(dmoe_jax.__all__) <= 45
    assert set(dmoe_jax.__all__) == {*dmoe_jax.public.__all__, *MODULES} <= set(dir(dmoe_jax))
    assert [name for name in dmoe_jax.__all__ if not is_explained(getattr(dmoe_jax, name), name)] == []
    for name in ("chain", "noloco", "nothing"):
        with pytest.raises(AttributeError, match=f"'{name}'"):
            getattr(dmoe_jax, name)


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_faces(name: str) -> None:
    """Each lists names that are there and explained, if not by themselves then where they are assigned."""
    face = getattr(dmoe_jax, name)
    assert face is sys.modules[f"dmoe_jax.{name}"]
    assert len(set(face.__all__)) == len(face.__all__) >= 5
    constants = explained_constants(name)
    assert {each for each in face.__all__ if not is_explained(getattr(face, each), each)} <= constants


def test_the_package_itself_loads_nothing() -> None:
    """JAX, trio and NumPy are loaded when a name that needs them is asked for, and the emulator for those who ask."""
    code = """if True:
        import sys, dmoe_jax
        print({"jax", "trio", "numpy"} & set(sys.modules))
        dmoe_jax.read_run
        print({"jax", "trio"} & set(sys.modules))
        dir(dmoe_jax), dmoe_jax.__all__, dmoe_jax.optim.noloco, dmoe_jax.connect
        print({"dmoe_jax.emulator", "dmoe_jax.cli"} & set(sys.modules))
        print(dmoe_jax.emulator.Emulator.__name__)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["set()", "set()", "set()", "Emulator"]
