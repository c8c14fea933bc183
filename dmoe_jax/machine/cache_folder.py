"""The folder for downloads and compiled programs that later runs use again."""

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """`dmoe_jax` in the user's cache folder: in XDG_CACHE_HOME, unless that is relative, or in ~/.cache.

    None for a user without a home, such as a container's uid that is in no passwd file.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "dmoe_jax"
