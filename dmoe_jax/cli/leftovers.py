"""Leftovers of runs that came to nothing, and of writers that were killed: found, and removed if nobody uses them.

A run that is complete, that somebody holds or whose records are damaged is left alone, with all that lies in its
folder. So is a folder of ours that holds anything which is not.
"""

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dmoe_jax.cli.run_list import DEPTH, INNER_FOLDERS, config_of, ending_of, records_of, size_of
from dmoe_jax.machine.disk import HOLDER, TRASH, UNFINISHED, hold_folder, is_empty, may_be_held
from dmoe_jax.runs.run_folder import CONFIG, RUN_FILES
from dmoe_jax.trained.saved_run import (
    LOGS,
    NODES,
    SHARED_FOLDER,
    UP_FLAGS,
    first_trainer,
    saved_experts,
    trainer_folders,
    up_logs,
)
from dmoe_jax.training.prepared_run import CHECKPOINT_FOLDER

_BEFORE_STEPS = {
    *("task", "baseline", "eval", "final_eval", "calls", "experts", "balance", "event"),
    *("corpus", "flops", "routers", "bars", "headline"),
}
"""Kinds of records that a run may have before it has made a step, or has measured anything."""

_NAMED_BY_TIME = re.compile(r"[\w.-]+-\d{8}-\d{6}(-\d+)?")
"""Names that commands give to folders themselves: an empty one was made by them."""

_JUST_MADE_S = 60.0
"""Seconds for which an empty folder may be one that a command is about to hold."""

_LOG_FILES = re.compile(rf"(dht|node\d+|trainer\d+)\.log|{re.escape(UP_FLAGS)}|\.up\.\d+\.json")
_NODE_FOLDERS = re.compile(rf"node\d+|{SHARED_FOLDER}")

_HALF_WRITTEN = re.compile(rf"({re.escape(UNFINISHED)}|{re.escape(TRASH)}).+|\d+\.orbax-checkpoint-tmp.*")
"""Names of checkpoints that are not whole; the last form is Orbax's own."""

_REPLACING = "|".join(rf"\.{re.escape(Path(name).stem)}\.\d+{re.escape(Path(name).suffix)}" for name in RUN_FILES)
_HALF_FILES = re.compile(rf"\.room(\.\d+)?|{_REPLACING}")
"""Names of files in a run folder that keep room on the disk, or were about to replace others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A folder or file that may be removed."""

    path: Path
    why: str
    """Reason, in words for the user."""
    size_bytes: int
    holds: tuple[Path, ...]
    """Folders that nobody may hold while it is removed."""


def find_leftovers(root: Path) -> list[Leftover]:
    """The leftovers in a folder of runs, or of one run and beside it, that nobody holds; by path. Writes nothing."""
    beside = [] if config_of(root) is None else [up_logs(root), saved_experts(root)]
    found = [each for path in (root, *beside) for each in _found_at(path, DEPTH, ())]
    return sorted(found, key=lambda each: each.path)


def remove(leftover: Leftover) -> bool:
    """Remove a leftover; False if it is none any more. What a kill leaves of it is one still. Of several the last come
    first: the experts of a `dmoe up` are known for such by its run and logs. Raises FolderInUse if somebody holds it
    now, OSError if it cannot be removed."""
    with ExitStack() as stack:
        for folder in leftover.holds:
            if folder.is_dir():
                stack.enter_context(hold_folder(folder, "run"))
        if _why(leftover.path) is None:
            return False
        _delete(leftover.path)
    return True


def _delete(path: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for each in path.iterdir():
        if each.name in (CONFIG, HOLDER):
            continue  # last of all: without them nobody knows that this was a run folder
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()
    shutil.rmtree(path)


def _found_at(path: Path, depth: int, around: tuple[Path, ...]) -> Iterator[Leftover]:
    """The path as a leftover, or those in it; `around` are the runs in whose folders it lies."""
    holds = (*around, *_held_with(path))
    if not path.is_dir() or path.is_symlink() or any(map(may_be_held, holds)):
        return
    if why := _why(path):
        yield Leftover(path=path, why=why, size_bytes=size_of(path), holds=holds)
        return
    if not all(map(_may_be_touched, (path, _run_of(path)))):
        return
    for each in _half_written_in(path):
        if each.parent in holds or not may_be_held(each.parent):
            where = tuple(dict.fromkeys((*holds, each.parent)))
            yield Leftover(path=each, why=_why(each) or "", size_bytes=size_of(each), holds=where)
    if depth and path.suffix not in (LOGS, NODES):
        inner = around if config_of(path) is None else (*around, path)
        for each in sorted(path.iterdir()):
            if not each.name.startswith(".") and each.name not in INNER_FOLDERS:
                yield from _found_at(each, depth - 1, inner)


def _run_of(path: Path) -> Path:
    """The run folder of the first trainer process to which a folder belongs, if it is one of a `dmoe up`; else it."""
    return first_trainer(path.with_suffix("") if path.suffix in (LOGS, NODES) else path)


def _held_with(path: Path) -> list[Path]:
    """The folders that processes hold while they use what lies at a path: those of one `dmoe up` belong together."""
    if not path.is_dir():
        return []
    experts = [holder.parent for holder in path.glob(f"*/*/{HOLDER}")] if path.suffix == NODES else []
    beside = [path, *trainer_folders(_run_of(path)).values(), up_logs(_run_of(path)), *experts]
    return list(dict.fromkeys(each for each in beside if each.is_dir()))


def _may_be_touched(path: Path) -> bool:
    """False for a run that is complete or whose records cannot be read."""
    records = [] if config_of(path) is None else records_of(path)
    return records is not None and ending_of(records) != "complete"


def _why(path: Path) -> str | None:
    """The reason that what lies at a path is a leftover, whoever holds it; None if it is none."""
    if _is_half_written(path):
        return "half written when its process was killed"
    if not path.is_dir():
        return None
    run = _run_of(path)
    beside = [each for each in (up_logs(run), saved_experts(run)) if each.exists()]
    if path.suffix in (LOGS, NODES):
        is_nothing = all(map(_is_nothing, [*trainer_folders(run).values(), *beside]))
        return "of a start that came to nothing" if is_nothing else None
    if not _is_nothing(path) or (saved_experts(run) in beside and not _is_nothing(saved_experts(run))):
        return None
    return "empty" if config_of(path) is None else "a run without a step"


def _is_nothing(path: Path) -> bool:
    """True if a folder is ours, and has nothing in it that anybody has trained, measured or put there."""
    if not path.is_dir() or path.is_symlink():
        return False
    if config_of(path) is not None:
        return _is_run_without_a_step(path)
    run = _run_of(path)
    if path.suffix == LOGS:
        is_known = config_of(run) is not None or (path / UP_FLAGS).exists() or is_empty(path)
        are_logs = all(_LOG_FILES.fullmatch(each.name) or each.name == HOLDER for each in path.iterdir())
        return is_known and are_logs and _is_ours(path)
    if path.suffix == NODES:
        return (config_of(run) is not None or (up_logs(run) / UP_FLAGS).exists()) and _has_learnt_nothing(path)
    return is_empty(path) and _is_ours(path)


def _is_ours(path: Path) -> bool:
    """True unless this is an empty folder that somebody has given a name to, or that a command has just made."""
    is_old = time.time() - path.stat().st_mtime > _JUST_MADE_S
    return any(path.iterdir()) or (is_old and bool(_NAMED_BY_TIME.fullmatch(path.name)))


def _is_run_without_a_step(path: Path) -> bool:
    records = records_of(path)
    if records is None or ending_of(records) == "complete" or {each["kind"] for each in records} - _BEFORE_STEPS:
        return False
    # Looked at, too: records may have found no room on the disk.
    if any(each.is_dir() and not _has_no_updates(each) for each in (path / CHECKPOINT_FOLDER).glob("*")):
        return False
    return all(
        each.name in {*RUN_FILES, HOLDER} or _is_half_written(each) or _is_inner(each) or _holds_nothing(each)
        for each in path.iterdir()
    )


def _is_inner(path: Path) -> bool:
    """True for a folder of ours in a run folder that has nothing in it but what a run without a step leaves there."""
    if path.name not in INNER_FOLDERS or not path.is_dir() or path.is_symlink():
        return False
    if path.name == CHECKPOINT_FOLDER:
        return all(each.is_dir() and _has_no_updates(each) for each in path.iterdir())
    return all(each.is_file() and each.name.startswith("events.out.tfevents") for each in path.iterdir())


def _has_no_updates(checkpoint: Path) -> bool:
    return checkpoint.name == "0" or bool(_HALF_WRITTEN.fullmatch(checkpoint.name))


def _holds_nothing(path: Path) -> bool:
    """True for a folder in that of an experiment which came to nothing, or which has only such folders in it."""
    if _is_nothing(path):
        return True
    is_plain = path.is_dir() and not path.is_symlink() and config_of(path) is None and path.suffix not in (LOGS, NODES)
    return is_plain and all(map(_holds_nothing, path.iterdir()))


def _has_learnt_nothing(nodes: Path) -> bool:
    """True if the folder of a `dmoe up`'s nodes has no expert that has learnt, nor anything that is not theirs.

    A checkpoint of 0 updates is what an expert began with."""
    of_nodes = [each for each in nodes.iterdir() if each.name != HOLDER]
    if not all(_NODE_FOLDERS.fullmatch(node.name) and node.is_dir() for node in of_nodes):
        return False
    experts = [expert for node in of_nodes for expert in node.iterdir()]
    saved = [each for expert in experts if expert.is_dir() for each in expert.iterdir()]
    return all(each.is_dir() for each in experts) and all(
        each.name == HOLDER or _HALF_WRITTEN.fullmatch(each.name) or (each.name == "0" and each.is_dir())
        for each in saved
    )


def _is_half_written(path: Path) -> bool:
    """True for what a killed writer has left in a run folder, its checkpoints, or the experts of a `dmoe up`."""
    folder, name = path.parent, path.name
    if _HALF_FILES.fullmatch(name):
        return path.is_file() and config_of(folder) is not None
    if not (_HALF_WRITTEN.fullmatch(name) and path.is_dir()):
        return False
    if folder.name == CHECKPOINT_FOLDER:
        return config_of(folder.parent) is not None
    nodes = folder.parent.parent
    return nodes.suffix == NODES and config_of(_run_of(nodes)) is not None


def _half_written_in(path: Path) -> list[Path]:
    """Checkpoints and files of a run, or of the experts of a `dmoe up`, that killed writers have left."""
    places = [*path.glob("*/*")] if path.suffix == NODES else [path, path / CHECKPOINT_FOLDER]
    return sorted(each for place in places if place.is_dir() for each in place.iterdir() if _is_half_written(each))
