"""Texts out of data sets of the library `datasets`: a folder that `save_to_disk` wrote, or a name on the hub.

Each record has a text in the column `text`; records follow each other, each on lines of its own.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmoe_jax.data.files import DataError, needed_package
from dmoe_jax.data.raw_text import Text, ended, own_text
from dmoe_jax.runs.endings import one_line

HUB = "hf:"
"""Beginning of a source that is a name on the Hugging Face hub: hf:NAME or hf:NAME:CONFIG."""

_COLUMN = "text"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SPLITS = (("train",), ("validation", "valid"), ("test",))
"""Names of train, valid and test."""


def is_saved_table(path: Path) -> bool:
    """True for a folder that `save_to_disk` of a data set, or of several splits, has written."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    )


def check_table(source: str) -> Any:
    """Check that a data set can be meant: a saved folder, or a name behind `HUB`; return the library that reads it.

    Raises:
      DataError: it is no name, or the package is missing.
    """
    name, _, config = source.removeprefix(HUB).partition(":")
    if source.startswith(HUB) and not (_NAME.fullmatch(name) and ":" not in config):
        raise DataError(f"--data {source}: expected {HUB}NAME or {HUB}NAME:CONFIG of a data set on the hub")
    return needed_package("datasets", "text", f"--data {source}")


def read_table(source: str) -> Text:
    """Read a data set's splits train, validation and test; or train alone, of which the end is then held out.

    Raises:
      DataError: it cannot be had, or has other splits, or no column of texts; or the package is missing.
    """
    library = check_table(source)
    name, _, config = source.removeprefix(HUB).partition(":")
    try:
        is_on_hub = source.startswith(HUB)
        found = library.load_dataset(name, config or None) if is_on_hub else library.load_from_disk(source)
    except Exception as error:  # of the network, of the disk, of its own: many kinds
        raise DataError(f"--data {source}: the data set cannot be had: {one_line(error)[:300]}") from error
    parts = [_joined(part, source) for part in _parts(found, source)]
    label = source if source.startswith(HUB) else Path(source).name
    return own_text(label, f"column {_COLUMN} of the data set {source}", parts)


def _parts(found: Any, source: str) -> list[Any]:
    """The splits, one or three; a data set without splits is one."""
    if not isinstance(found, Mapping):
        return [found]
    parts = [next((found[name] for name in names if name in found), None) for names in _SPLITS]
    if all(part is not None for part in parts):
        return parts
    if parts[0] is None or any(part is not None for part in parts[1:]):
        raise DataError(
            f"--data {source}: expected the splits train, validation and test, or train alone; got {', '.join(found)}"
        )
    return parts[:1]


def _joined(part: Any, source: str) -> str:
    """The texts of a split, each with a line feed at its end."""
    if _COLUMN not in part.column_names:
        raise DataError(f"--data {source}: expected a column {_COLUMN!r}, got {', '.join(part.column_names)}")
    texts = [*part[_COLUMN]]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"--data {source}: expected texts in the column {_COLUMN!r}")
    return "".join(map(ended, texts))
