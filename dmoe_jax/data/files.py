"""Files of data sets: where they are found, how they are unpacked and downloaded."""

import gzip
import http.client
import importlib
import os
import shutil
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dmoe_jax.machine.cache_folder import cache_folder

MAX_FILE_BYTES = 16 * 2**20
"""Longest download, and longest text: the largest, train of WikiText-2, has 10.8 MB."""

SOCKET_TIMEOUT_S = 10.0
"""Patience with one silent connection: a machine without a network should learn it soon."""

TOTAL_TIMEOUT_S = 300.0
"""Patience with all of a download: 13 MB at 45 kB/s."""

T = TypeVar("T")


class DataError(ValueError):
    """A file is missing, damaged or not the text it should be. The message names it and what was expected."""


class NotAtHand(DataError):
    """Neither a folder, nor the cache, nor the network has the data. The message says what was tried."""


def find_data(name: str, read: Callable[[Path], T], download: Callable[[Path], None], url: str) -> tuple[T, str]:
    """Read a data set from a folder of `$DMOE_DATA`, else of the user's cache, else from the network.

    The cache is in `$XDG_CACHE_HOME` or `~/.cache`. A download is kept there, in place of a damaged copy.

    Args:
      name: name of the folder.
      read: reads the files of a folder. Raises DataError.
      download: writes the files of the public copy at `url` into a folder. Raises DataError.

    Returns: the data, and their origin for people.

    Raises:
      NotAtHand: nothing has it. DataError: `$DMOE_DATA` is set, but what it names is missing or damaged.
    """
    if named := os.environ.get("DMOE_DATA"):
        return read(Path(named, name)), f"DMOE_DATA={named}"
    tried = ["DMOE_DATA is not set"]
    caches = cache_folder()
    cache = None if caches is None else caches / name
    if cache is None:
        tried.append("no home directory for a cache")
    elif not cache.is_dir():
        tried.append(f"nothing in the cache {cache}")
    else:
        try:
            return read(cache), f"the cache {cache}"
        except DataError as error:
            tried.append(f"cache: {error}")
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            download(folder)
            return read(folder), f"a download from {url} ({_keep(folder, cache)})"
    except (DataError, OSError) as error:
        raise NotAtHand("; ".join([*tried, f"download: {error}"])) from error


def _keep(folder: Path, cache: Path | None) -> str:
    """Move the files into the cache; one that cannot be written costs the next run a download, no more."""
    if cache is None:
        return "not kept: there is no home directory"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as beside:
            for path in folder.iterdir():  # under another name first: no reader sees half a file
                os.replace(shutil.copy(path, beside), cache / path.name)
    except OSError as error:
        return f"not kept: {error}"
    return f"kept in {cache}"


def needed_package(name: str, extra: str, what: str) -> Any:
    """Import a package that only an extra of ours installs, for `what`. Raises DataError if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"{what} needs the package {name} ({error}): pip install 'dmoe_jax[{extra}]'") from error


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """The bytes of a file. Raises DataError if it cannot be read, or has more than so many."""
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > most_bytes:
        raise DataError(f"{path}: expected at most {most_bytes:,} bytes, got more")
    return data


def read_gzip(path: Path, most_bytes: int, what: str) -> bytes:
    """The first so many bytes that are packed in a file: a small one may unfold to fill the memory.

    Raises:
      DataError: there is no such file, or it cannot be unpacked.
    """
    try:
        with gzip.open(path) as file:
            return file.read(most_bytes)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: expected {what}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: expected {what}: {error}") from error


def fetch(url: str, deadline: float) -> bytes:
    """The bytes behind an address: at most `MAX_FILE_BYTES`, before `deadline` on the monotonic clock.

    Certificates are verified, and proxies come from the environment.

    Raises:
      DataError: naming the address, and what was wrong with it.
    """
    parts: list[bytes] = []
    size = 0
    try:
        with urllib.request.urlopen(url, timeout=SOCKET_TIMEOUT_S) as file:
            while part := file.read(1 << 16):
                parts.append(part)
                size += len(part)
                if size > MAX_FILE_BYTES:
                    raise DataError(f"{url}: expected at most {MAX_FILE_BYTES:,} bytes, got more")
                if time.monotonic() > deadline:
                    raise DataError(f"{url}: not finished after {TOTAL_TIMEOUT_S:.0f} s")
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{url}: {error}") from error
    return b"".join(parts)
