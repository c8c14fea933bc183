"""Checkpoints are whole or absent, the newest usable one wins, and another model's is refused by name."""

import errno
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from dmoe_jax.checkpoints import CheckpointFiles, Checkpoints, read_arrays
from dmoe_jax.machine.disk import CheckpointError


def state_at(step: int) -> dict:
    params = {"w": np.full((2, 3), step, np.float32), "b": np.arange(3, dtype=np.float32)}
    return {"params": params, "opt": optax.adam(1e-3).init(params)}


def saved_in(folder: Path, *states: tuple[int, Any], **options: Any) -> Checkpoints:
    """Checkpoints of a folder, into which these states were saved one after the other."""
    checkpoints = Checkpoints(folder, **options)
    for step, state in states:
        checkpoints.save(step, state, {})
    return checkpoints


def numbers(*steps: int) -> list[tuple[int, Any]]:
    return [(step, state_at(step)) for step in steps]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_newest_is_restored_and_few_are_kept(tmp_path: Path) -> None:
    """Two of three saves stay, and the latest comes back with its facts and its optimiser state."""
    checkpoints = saved_in(tmp_path / "new" / "folder", *numbers(1, 2))
    checkpoints.save(3, state_at(3), {"positions": [3, 7]})
    checkpoints.save(3, state_at(9), {})  # saved already: not written twice
    step, state, facts = checkpoints.restore_latest(state_at(0))
    assert (step, facts) == (3, {"positions": [3, 7]})
    np.testing.assert_array_equal(state["params"]["w"], np.full((2, 3), 3.0))
    assert state["opt"][0].mu["w"].shape == (2, 3)
    checkpoints.close()
    assert names_in(tmp_path / "new" / "folder") == ["2", "3"]


def test_empty_folder_and_wrong_model_are_refused(tmp_path: Path) -> None:
    """The error names the folder; a model of another width is not loaded by halves."""
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / "2.orbax-checkpoint-tmp-17" / "state").mkdir(parents=True)  # of a writer that was killed
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path}"):
        checkpoints.restore_latest(state_at(0))
    checkpoints.save(1, {"w": np.zeros(3, np.float32)}, {})
    with pytest.raises(CheckpointError, match=r"another model: \['w'\] is float32\[3\], expected float32\[4\]"):
        checkpoints.restore_latest({"w": np.zeros(4, np.float32)})


def test_arrays_without_elements_come_back(tmp_path: Path) -> None:
    """An adaptive softmax without tail clusters has some, in its optimiser's state too."""
    empty = np.zeros((0, 4), np.float32)
    state = {"w": np.arange(3.0), "tail": (empty, empty.T), "n": np.int32(7)}
    checkpoints = saved_in(tmp_path, (1, state))
    _, restored, _ = checkpoints.restore_latest(state)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), restored, state)
    with pytest.raises(CheckpointError, match="another model"):
        checkpoints.restore_latest(state | {"tail": (np.zeros((1, 4), np.float32), empty.T)})


def files_of(path: Path) -> list[Path]:
    return [each for each in sorted(path.rglob("*")) if each.is_file()]


def flip_a_number(path: Path) -> None:
    """One byte in the middle of the largest file, which holds the arrays."""
    largest = max(files_of(path / "state"), key=lambda each: each.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(data)


def halve(path: Path) -> None:
    for each in files_of(path):
        each.write_bytes(each.read_bytes()[: each.stat().st_size // 2])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty files": lambda path: [each.write_bytes(b"") for each in files_of(path)],
    "half files": halve,
    "no files": lambda path: [each.unlink() for each in files_of(path)],
    "no state": lambda path: shutil.rmtree(path / "state"),
    "no facts": lambda path: shutil.rmtree(path / "facts"),
    "a wrong number": flip_a_number,
    "only facts": lambda path: [each.unlink() for each in files_of(path) if each.parent != path / "facts"],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_gives_way_and_stays_out_of_the_way(damage: str, tmp_path: Path) -> None:
    """The older one is taken, with a sentence; what follows is saved and found, though its number is lower."""
    saved_in(tmp_path, *numbers(2, 8))
    DAMAGES[damage](tmp_path / "8")
    told: list[str] = []
    second = Checkpoints(tmp_path, say=told.append)
    step, state, _ = second.restore_latest(state_at(0))
    assert (step, state["params"]["w"][0, 0]) == (2, 2.0)
    (text,) = told
    assert f"checkpoint {tmp_path / '8'} cannot be read: " in text
    assert text.endswith("; it is kept as set-aside-8; checkpoint 2 is taken")
    third = saved_in(tmp_path, *numbers(3, 4, 5), say=told.append)
    assert third.restore_latest(state_at(0))[0] == 5
    assert names_in(tmp_path) == ["4", "5", "set-aside-8"]
    assert len(told) == 1


def test_nothing_is_moved_where_no_checkpoint_can_be_used(tmp_path: Path) -> None:
    """The reasons are in one error; for a fresh start they are set aside, and what it learns comes first."""
    checkpoints = saved_in(tmp_path, *numbers(2, 8))
    for name in ("2", "8"):
        (tmp_path / name / "facts" / "metadata").write_text("{")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: .*8 cannot .*2 cannot be read"):
        checkpoints.restore_latest(state_at(0))
    assert names_in(tmp_path) == ["2", "8"]
    assert checkpoints.restore_or_begin(state_at(0)) is None
    checkpoints.save(1, state_at(1), {})
    found = Checkpoints(tmp_path).restore_or_begin(state_at(0))
    assert found[0] == 1


def test_a_broken_checkpoint_is_written_anew(tmp_path: Path) -> None:
    """Also a file of its name; a sound one, by whomever, stays as it is."""
    first = saved_in(tmp_path, *numbers(4))
    saved_in(tmp_path, (4, state_at(9)))
    assert first.restore_latest(state_at(0))[1]["params"]["w"][0, 0] == 4
    flip_a_number(tmp_path / "4")
    (tmp_path / "5").write_text("a file")
    assert saved_in(tmp_path, *numbers(4, 5)).restore_latest(state_at(0))[0] == 5
    assert {"set-aside-4", "set-aside-5"} <= {*names_in(tmp_path)}


def test_what_was_just_saved_is_not_deleted_for_higher_numbers(tmp_path: Path) -> None:
    """Those may be of another node that shares the folder, or not be usable."""
    saved_in(tmp_path, *numbers(7, 8))
    saved_in(tmp_path, *numbers(1, 2, 3))
    assert names_in(tmp_path) == ["2", "3", "7", "8"]


NO_ROOM = [
    OSError(number, os.strerror(number), ".unfinished-2.x/half")
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
]


@pytest.mark.parametrize(
    ("place", "error", "line"),
    [
        *(("os.posix_fallocate", error, f"{error.strerror}$") for error in NO_ROOM),
        ("orbax.checkpoint.Checkpointer.save", RuntimeError("its own words\nand its advice"), "its own words$"),
    ],
)
def test_a_write_that_fails_leaves_nothing_behind(
    place: str, error: Exception, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error of ours names the checkpoint, also in the middle of it; those that were there are there still."""
    checkpoints = saved_in(tmp_path, *numbers(1))

    def failing(*args: Any, **more: Any) -> None:
        for folder in (each.parent for each in args if isinstance(each, Path)):
            (folder / "half").write_text("x")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(place, failing)
        with pytest.raises(CheckpointError, match=rf"checkpoint {tmp_path / '2'} cannot be written: {line}"):
            checkpoints.save(2, state_at(2), {})
    assert names_in(tmp_path) == ["1"]
    checkpoints.save(2, state_at(2), {})
    assert checkpoints.restore_latest(state_at(0))[0] == 2


def test_a_checkpoint_that_may_be_sound_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files, or no right to read it, say nothing of what is in it: no older one is taken."""
    checkpoints = saved_in(tmp_path, *numbers(1, 2))

    def refused(path: Path, *args: Any, **more: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        with pytest.raises(CheckpointError, match=r"2 cannot be read: .*Too many open files"):
            checkpoints.restore_or_begin(state_at(0))
    assert checkpoints.restore_latest(state_at(0))[0] == 2


def test_a_checkpoint_without_checksums_is_read(tmp_path: Path) -> None:
    """Those of earlier versions have none."""
    CheckpointFiles().write(tmp_path / "3", state_at(3), {"a": 1})
    (tmp_path / "3" / "checksums.json").unlink()
    assert Checkpoints(tmp_path).restore_latest(state_at(0))[::2] == (3, {"a": 1})


def test_readers_fall_back_and_write_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest that can be read is inspected, and a sentence says which it is."""
    saved_in(tmp_path, *numbers(2, 8))
    flip_a_number(tmp_path / "8")
    step, arrays = read_arrays(tmp_path, lambda names: names == ("params", "w"))
    assert step == 2
    assert list(arrays) == [("params", "w")]
    assert arrays["params", "w"][0, 0] == 2
    assert "8 cannot be read: " in caplog.text
    assert caplog.text.strip().endswith("checkpoint 2 is read instead")
    assert names_in(tmp_path) == ["2", "8"]


def test_a_reader_may_ask_for_one_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The one of that number, or none: a damaged one is not replaced, and the error names those that are there."""
    saved_in(tmp_path, *numbers(2, 8))
    step, arrays = read_arrays(tmp_path, lambda names: names == ("params", "w"), 2)
    assert (step, arrays["params", "w"][0, 0]) == (2, 2)
    flip_a_number(tmp_path / "8")
    with pytest.raises(CheckpointError, match="8 cannot be read: "):
        read_arrays(tmp_path, lambda names: True, 8)
    with pytest.raises(CheckpointError, match=rf"no checkpoint 5 in {tmp_path}; those that are there: 2, 8"):
        read_arrays(tmp_path, lambda names: True, 5)
    with pytest.raises(CheckpointError, match="those that are there: none"):
        read_arrays(tmp_path / "new", lambda names: True, 5)
    assert not caplog.text


def test_some_are_kept_beside_the_newest(tmp_path: Path) -> None:
    """As long as they are asked for; the newest is restored all the same."""
    kept = {3}
    checkpoints = Checkpoints(tmp_path, also_kept=lambda held: kept & {*held})
    for step in range(1, 7):
        checkpoints.save(step, state_at(step), {})
    assert names_in(tmp_path) == ["3", "5", "6"]
    assert checkpoints.restore_latest(state_at(0))[0] == 6
    kept.clear()
    checkpoints.save(7, state_at(7), {})
    assert names_in(tmp_path) == ["6", "7"]
