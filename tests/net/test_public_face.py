"""What `import net` gives, and what it costs."""

import subprocess
import sys
from pathlib import Path

import pytest

import net
import net.public


def test_every_promised_name_is_there_and_explained() -> None:
    """Each is the object of its own module, has a docstring, and is told by `dir`; others are refused by name."""
    assert net.__all__ == net.public.__all__
    for name in net.__all__:
        assert getattr(net, name) is getattr(net.public, name)
        assert getattr(net, name).__doc__ or name in ("Body", "Handler")  # types, explained where they are defined
    assert set(net.__all__) < set(dir(net))
    with pytest.raises(AttributeError, match="'nothing'"):
        net.nothing  # noqa: B018


def test_no_module_of_the_package_goes_through_its_face() -> None:
    """Else there would be circles, and whoever imports one module would load all."""
    root = Path(net.__file__).parent
    for path in root.rglob("*.py"):
        if path != root / "__init__.py":
            assert "net.public" not in path.read_text(), path
            assert "\nfrom net import" not in path.read_text(), path


def test_the_package_itself_loads_nothing() -> None:
    """Neither trio nor NumPy nor cryptography, until a name is asked for."""
    heavy = "{'trio', 'numpy', 'cryptography'} & set(sys.modules)"
    code = f"import sys, net.errors; print({heavy}); net.run; print('trio' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(net.__file__).parents[1]
    )
    assert done.stdout.split() == ["set()", "True"]
