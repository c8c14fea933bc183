"""Errors and room of files that outlive a process, and folders that one process at a time may write to."""

import itertools
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl

HOLDER = ".in-use"
"""Name of the file in a folder that its holder has locked, and that names the holder."""

UNFINISHED, TRASH = ".unfinished-", ".old-"
"""Beginnings of the names of a checkpoint that is being written, and of one that is about to be deleted."""

_ATTEMPTS, _ATTEMPT_S = 5, 0.01
"""Further attempts to hold a folder, and seconds between them."""

_PIECE_BYTES = 1 << 30
"""Bytes of the largest file that tries whether there is room; Orbax's files are at most twice as large."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written, or is one of another model. The message names the file or folder."""


class FolderInUse(OSError):
    """Another process writes to a folder. The message says which process, where, and since when."""


@contextmanager
def errors_name(path: Path, beside: Path) -> Iterator[None]:
    """Have an OSError of the block name the path that somebody asked for, where it names what is written beside it
    first, or nothing: `beside` is that path, or how it begins."""
    try:
        yield
    except OSError as error:
        if error.errno is None or not str(error.filename or beside).startswith(str(beside)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def url_of(path: Path) -> str | None:
    """The URL that a path was made of: gs://bucket/run for gs:/bucket/run; None for a path of this machine."""
    found = re.match(r"(gs|s3):/+(?=[^/])", str(path))
    return None if found is None else f"{found[1]}://{str(path)[found.end() :]}"


def check_local(path: Path, what: str) -> None:
    """Raise ValueError for a URL: `what` would be written there, and needs renames that are atomic, and locks."""
    if (url := url_of(path)) is not None:
        raise ValueError(
            f"{what} cannot be written to {url}: it needs a file system of this machine, with locks and with renames "
            "that are atomic; copy it there afterwards"
        )


@contextmanager
def hold_folder(folder: Path, what: str) -> Iterator[None]:
    """Keep other processes out of a folder while the block lasts; `what` goes on there, for the message: "run".

    The folder is made if it is not there, and removed again if nothing was written to it. The system takes the lock
    from a process that dies. (Windows, and file systems without locks: nobody is kept out.)

    Raises:
      FolderInUse: somebody else holds it, perhaps in this process. OSError: it cannot be written to. ValueError: it is
        not on this machine.
    """
    check_local(folder, f"the {what}")
    if sys.platform == "win32":
        yield
        return
    is_new = not folder.exists()
    for left in itertools.count(_ATTEMPTS, -1):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / HOLDER).open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if left <= 0:
                raise _in_use(folder, what, file) from None
            file.close()
            time.sleep(_ATTEMPT_S)  # whoever looks whether the folder is held holds it for a moment
            continue
        except OSError:  # a file system without locks
            break
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), (folder / HOLDER).stat()):
                break
        file.close()  # its holder took it away between the two lines: there is a new one
    with file:
        with suppress(OSError):  # a full disk: the lock holds all the same
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
            file.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                (folder / HOLDER).unlink()
                if is_new:
                    folder.rmdir()  # unless something was written to it


def check_not_held(folder: Path, what: str) -> None:
    """Raise FolderInUse if somebody holds the folder. Writes nothing."""
    if sys.platform == "win32":
        return
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError), (folder / HOLDER).open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(folder, what, file) from None
        except OSError:  # a file system without locks
            return


def may_be_held(folder: Path) -> bool:
    """True if somebody holds the folder, or if that cannot be known: on Windows, or without locks. Writes nothing."""
    if sys.platform == "win32":
        return True
    try:
        with (folder / HOLDER).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return False


def is_empty(folder: Path) -> bool:
    """True if nothing lies in a folder but what its holder put there to hold it."""
    return all(path.name == HOLDER for path in folder.iterdir())


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise OSError if so many bytes do not fit into a folder, or files may not be so large."""
    if not hasattr(os, "posix_fallocate"):
        return
    trial = folder / ".room"
    pieces = []
    try:
        for number, start in enumerate(range(0, num_bytes, _PIECE_BYTES)):
            pieces.append(trial.with_suffix(f".{number}"))
            reserve(pieces[-1], min(_PIECE_BYTES, num_bytes - start))
    finally:
        for piece in pieces:
            piece.unlink(missing_ok=True)


def reserve(path: Path, num_bytes: int) -> None:
    """Make a file of so many bytes, which then has its room on the disk. Raises OSError where there is none."""
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except AttributeError:  # not on this system
            file.write(bytes(num_bytes))


def _in_use(folder: Path, what: str, file: IO[str]) -> FolderInUse:
    file.seek(0)
    holder = file.read(200).strip() or "another process"
    file.close()
    return FolderInUse(f"the {what} in {folder} is under way: {holder} writes there; end that first")
