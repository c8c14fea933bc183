"""`--init`: the flags with which a model, or its experts, fit an export that they are to begin with. Imports no JAX."""

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dmoe_jax.cli.train_options import LanguageModelOptions
from dmoe_jax.layer_config import LayerConfig, Route
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.flags import as_flags
from dmoe_jax.trained.export_files import read_facts
from dmoe_jax.trained.remote import local_copy
from dmoe_jax.training.prepared_run import is_code

_WORD = re.compile(r"[\w.+=]{1,100}")
_MOST_EXTENTS = 8


def settings_of_experts(layer: LayerConfig, route: Route) -> dict[str, Any]:
    """The settings that decide the shapes of experts, by the names of their flags."""
    return {"route": route, "d_model": layer.d_model, "num_heads": layer.num_heads, "d_ff": layer.d_ff}


def settings_of_model(language: LanguageModelOptions) -> dict[str, Any]:
    """The settings in which a model and an export must agree, by the names of their flags."""
    own = {"router": language.router, "num_layers": language.num_layers, "grid_size": language.grid_size}
    return settings_of_experts(language.layer, language.route) | own


def check_flags(path: Path, ours: Mapping[str, Any]) -> None:
    """Raise `UsageError` with the flags that fit unless settings of ours are those of the export at a path; ValueError
    if there is no export, OSError if it cannot be read."""
    facts = read_facts(path)
    layer = facts.sizes.get("layer")
    told = {**(layer if isinstance(layer, dict) else {}), **facts.sizes, "router": facts.router}
    theirs = {name: value for name in ours if (value := _setting_untrusted(told.get(name))) is not None}
    if differ := {name: value for name, value in theirs.items() if value != ours[name]}:
        raise UsageError(f"the model in {path} was trained with other flags; give {shlex.join(as_flags(differ))}")


@contextmanager
def fitting(init: Path, ours: Mapping[str, Any]) -> Iterator[Path]:
    """Yield an export, or for a URL a copy on this machine, as `local_copy` does. If the body raises ValueError because
    it cannot begin with that, say which flags fit, as `check_flags` does."""
    with local_copy(init) as path:
        try:
            yield path
        except ValueError as error:
            try:
                check_flags(path, ours)
            except (ValueError, OSError):
                pass  # the first error says more
            except UsageError as told:
                raise told from error
            raise


def _setting_untrusted(value: object) -> object:
    """A setting of a file as a flag has it; None for what no flag of ours may be, and for code, which nobody offers."""
    if isinstance(value, list):
        is_grid = 0 < len(value) <= _MOST_EXTENTS and all(isinstance(_setting_untrusted(each), int) for each in value)
        return tuple(value) if is_grid else None
    if isinstance(value, str):
        return value if _WORD.fullmatch(value) and not is_code(value) else None
    return value if type(value) is int and 0 < value < 1 << 31 else None
