"""Runs, exports and experts' checkpoints at a URL (gs://, s3://), copied here for as long as they are read.

Nothing is written to such places: runs need renames that are atomic, and locks.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from dmoe_jax.machine.disk import url_of
from dmoe_jax.runs.endings import one_line
from dmoe_jax.trained.export_files import is_export, vocabulary_folder

_LEFT = ("set-aside-", "inspection")
"""Beginnings of names that no model is read from; so are those with a dot."""


@contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """Yield the path itself, or for a URL a copy on this machine, which is deleted after the body. Blocks.

    Raises:
      ValueError: the package for such URLs is missing; the message names its extra. OSError: it cannot be read.
    """
    url = url_of(path)
    if url is None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="dmoe-") as folder:
        copy = Path(folder) / PurePosixPath(url).name
        try:
            from etils import epath

            source = epath.Path(url)
            _copy(source, copy)
            words = vocabulary_folder(copy)
            if is_export(copy) and words != copy and (source.parent / words.name).exists():
                _copy(source.parent / words.name, words)
        except ImportError as error:
            scheme = url.partition(":")[0]
            raise ValueError(
                f"{url} is read with a package that is missing: pip install 'dmoe_jax[{scheme}]'"
            ) from error
        except Exception as error:  # each store has errors of its own
            raise OSError(f"{url} cannot be read: {one_line(error)[:300]}") from error
        yield copy


def _copy(source: Any, target: Path) -> None:
    if not source.exists():
        raise FileNotFoundError("there is nothing there")
    if not source.is_dir():
        with source.open("rb") as reading, target.open("wb") as writing:
            shutil.copyfileobj(reading, writing, 1 << 20)
        return
    target.mkdir()
    for each in source.iterdir():
        # A store has names with which a path would lead elsewhere, such as "..".
        if each.name and not each.name.startswith((".", *_LEFT)) and str(each) != str(source):
            _copy(each, target / each.name)
