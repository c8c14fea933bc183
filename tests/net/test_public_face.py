"""Names that `import dmoe_net` gives, and its cost."""

import subprocess
import sys
from pathlib import Path

import pytest

import dmoe_net
import dmoe_net.public


def test_every_promised_name_is_there_and_explained() -> None:
    """Each is the object of its own module, has a docstring, and is told by `dir`; others are refused by name."""
    assert dmoe_net.__all__ == dmoe_net.public.__all__
    for name in dmoe_net.__all__:
        assert getattr(dmoe_net, name) is getattr(dmoe_net.public, name)
        assert getattr(dmoe_net, name).__doc__ or name in ("Body", "Handler")  # types, explained where they are defined
    assert set(dmoe_net.__all__) < set(dir(dmoe_net))
    with pytest.raises(AttributeError, match="'nothing'"):
        dmoe_net.nothing  # noqa: B018


def test_no_module_of_the_package_goes_through_its_face() -> None:
    """Else there would be circles, and whoever imports one module would load all."""
    root = Path(dmoe_net.__file__).parent
    for path in root.rglob("*.py"):
        if path != root / "__init__.py":
            assert "dmoe_net.public" not in path.read_text(), path
            assert "\nfrom dmoe_net import" not in path.read_text(), path


def test_the_package_itself_loads_nothing() -> None:
    """Neither trio nor NumPy nor cryptography, until a name is asked for."""
    heavy = "{'trio', 'numpy', 'cryptography'} & set(sys.modules)"
    code = f"import sys, dmoe_net.errors; print({heavy}); dmoe_net.run; print('trio' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(dmoe_net.__file__).parents[1]
    )
    assert done.stdout.split() == ["set()", "True"]
