"""Checkpoints are whole or absent, the newest usable one wins, and another model's is refused by name."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.arrays import host_copy
from dmoe_jax.checkpoints import CheckpointFiles, Checkpoints, read_arrays
from dmoe_jax.machine.disk import CheckpointError


def state_at(step: int) -> dict:
    params = {"w": np.full((2, 3), step, np.float32), "b": np.arange(3, dtype=np.float32)}
    return {"params": params, "opt": optax.adam(1e-3).init(params)}


def test_newest_is_restored_and_few_are_kept(tmp_path: Path) -> None:
    """Two of three saves stay, and the latest comes back with its facts and its optimiser state."""
    checkpoints = Checkpoints(tmp_path / "new" / "folder")
    for step in (1, 2, 3):
        checkpoints.save(step, state_at(step), {"positions": [step, 7]})
    checkpoints.save(3, state_at(9), {})  # saved already: not written twice
    step, state, facts = checkpoints.restore_latest(state_at(0))
    assert (step, facts) == (3, {"positions": [3, 7]})
    np.testing.assert_array_equal(state["params"]["w"], np.full((2, 3), 3.0))
    assert state["opt"][0].mu["w"].shape == (2, 3)
    checkpoints.close()
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["2", "3"]


def test_empty_folder_and_wrong_model_are_refused(tmp_path: Path) -> None:
    """The error names the folder; a model of another width is not loaded by halves."""
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path}"):
        checkpoints.restore_latest(state_at(0))
    checkpoints.save(1, {"w": np.zeros(3, np.float32)}, {})
    with pytest.raises(CheckpointError, match=r"another model: \['w'\] is float32\[3\], expected float32\[4\]"):
        checkpoints.restore_latest({"w": np.zeros(4, np.float32)})
    checkpoints.close()


def test_unfinished_write_is_not_a_checkpoint(tmp_path: Path) -> None:
    """A folder that a killed writer leaves behind is passed over."""
    first = Checkpoints(tmp_path)
    first.save(1, state_at(1), {})
    first.close()
    (tmp_path / "2.orbax-checkpoint-tmp-17" / "state").mkdir(parents=True)
    step, _, _ = Checkpoints(tmp_path).restore_latest(state_at(0))
    assert step == 1


def test_host_copy_owns_its_memory() -> None:
    """Donation of the original cannot reach the copy."""
    original = jnp.arange(4.0)
    copy = host_copy({"x": original})["x"]
    assert copy.flags.owndata
    assert not np.shares_memory(copy, np.asarray(original))


def test_arrays_without_elements_come_back(tmp_path: Path) -> None:
    """An adaptive softmax without tail clusters has some, in its optimiser's state too."""
    state = {
        "w": np.arange(3.0),
        "tail": (np.zeros((0, 4), np.float32), np.zeros((4, 0), np.float32)),
        "n": np.int32(7),
    }
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    _, restored, _ = checkpoints.restore_latest(state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), restored) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )
    np.testing.assert_array_equal(restored["w"], state["w"])
    assert int(restored["n"]) == 7
    with pytest.raises(CheckpointError, match="another model"):
        checkpoints.restore_latest(state | {"tail": (np.zeros((1, 4), np.float32), state["tail"][1])})
    checkpoints.close()


def files_of(path: Path) -> list[Path]:
    return [each for each in sorted(path.rglob("*")) if each.is_file()]


def flip_a_number(path: Path) -> None:
    """One byte in the middle of the largest file, which holds the arrays."""
    largest = max(files_of(path / "state"), key=lambda each: each.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty files": lambda path: [each.write_bytes(b"") for each in files_of(path)],
    "half files": lambda path: [
        each.write_bytes(each.read_bytes()[: each.stat().st_size // 2]) for each in files_of(path)
    ],
    "no files": lambda path: [each.unlink() for each in files_of(path)],
    "no state": lambda path: shutil.rmtree(path / "state"),
    "no facts": lambda path: shutil.rmtree(path / "facts"),
    "a wrong number": flip_a_number,
    "an old one without files": lambda path: [
        each.unlink() for each in files_of(path) if each.parent != path / "facts"
    ],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_gives_way_and_stays_out_of_the_way(damage: str, tmp_path: Path) -> None:
    """The older one is taken, with a sentence; what follows is saved and found, though its number is lower."""
    first = Checkpoints(tmp_path)
    for step in (2, 8):
        first.save(step, state_at(step), {})
    DAMAGES[damage](tmp_path / "8")
    told: list[str] = []
    second = Checkpoints(tmp_path, say=told.append)
    step, state, _ = second.restore_latest(state_at(0))
    assert (step, state["params"]["w"][0, 0]) == (2, 2.0)
    (text,) = told
    assert f"checkpoint {tmp_path / '8'} cannot be read: " in text
    assert text.endswith("; it is kept as set-aside-8; checkpoint 2 is taken")
    for step in (3, 4, 5):
        second.save(step, state_at(step), {})
    third = Checkpoints(tmp_path, say=told.append)
    assert third.restore_latest(state_at(0))[0] == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5", "set-aside-8"]
    assert len(told) == 1


def test_nothing_is_moved_where_no_checkpoint_can_be_used(tmp_path: Path) -> None:
    """The reasons are in one error; for a fresh start they are set aside, and what it learns comes first."""
    checkpoints = Checkpoints(tmp_path)
    for step in (2, 8):
        checkpoints.save(step, state_at(step), {})
        (tmp_path / str(step) / "facts" / "metadata").write_text("{")
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* can be used: checkpoint .*8 cannot .*2 cannot be read"
    ):
        checkpoints.restore_latest(state_at(0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "8"]
    assert checkpoints.restore_or_begin(state_at(0)) is None
    checkpoints.save(1, state_at(1), {})
    found = Checkpoints(tmp_path).restore_or_begin(state_at(0))
    assert found is not None
    assert found[0] == 1


def test_a_broken_checkpoint_is_written_anew(tmp_path: Path) -> None:
    """Also a file of its name; a sound one, by whomever, stays as it is."""
    first = Checkpoints(tmp_path)
    first.save(4, state_at(4), {})
    Checkpoints(tmp_path).save(4, state_at(9), {})
    assert first.restore_latest(state_at(0))[1]["params"]["w"][0, 0] == 4
    flip_a_number(tmp_path / "4")
    (tmp_path / "5").write_text("a file")
    second = Checkpoints(tmp_path)
    for step in (4, 5):
        second.save(step, state_at(step), {})
    assert second.restore_latest(state_at(0))[0] == 5
    assert {"set-aside-4", "set-aside-5"} <= {path.name for path in tmp_path.iterdir()}


def test_what_was_just_saved_is_not_deleted_for_higher_numbers(tmp_path: Path) -> None:
    """Those may be of another node that shares the folder, or not be usable."""
    for step in (7, 8):
        Checkpoints(tmp_path).save(step, state_at(step), {})
    late = Checkpoints(tmp_path)
    for step in (1, 2, 3):
        late.save(step, state_at(step), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "7", "8"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_full_disk_leaves_nothing_behind(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error of ours, which names the checkpoint; those that were there are there still."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state_at(1), {})

    def full(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            CheckpointError, match=rf"checkpoint {tmp_path / '2'} cannot be written: .*{os.strerror(number)}"
        ):
            checkpoints.save(2, state_at(2), {})
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    checkpoints.save(2, state_at(2), {})
    assert checkpoints.restore_latest(state_at(0))[0] == 2


def test_an_error_of_orbax_is_one_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a write too, of which nothing stays."""
    checkpoints = Checkpoints(tmp_path)

    def broken(self: object, path: Path, *args: object, **more: object) -> None:
        (path.parent / "half").write_text("x")
        raise RuntimeError("RESOURCE_EXHAUSTED: a library's own words\nand its advice")

    with monkeypatch.context() as patch:
        patch.setattr("orbax.checkpoint.Checkpointer.save", broken)
        with pytest.raises(CheckpointError, match=r"cannot be written: RESOURCE_EXHAUSTED: a library's own words$"):
            checkpoints.save(2, state_at(2), {})
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_may_be_sound_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files, or no right to read it, say nothing of what is in it: no older one is taken."""
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, state_at(step), {})

    def refused(path: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("dmoe_jax.checkpoints._checksums", refused)
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
    checkpoints = Checkpoints(tmp_path)
    for step in (2, 8):
        checkpoints.save(step, state_at(step), {})
    flip_a_number(tmp_path / "8")
    step, arrays = read_arrays(tmp_path, lambda names: names == ("params", "w"))
    assert step == 2
    assert list(arrays) == [("params", "w")]
    assert arrays["params", "w"][0, 0] == 2
    assert "8 cannot be read: " in caplog.text
    assert caplog.text.strip().endswith("checkpoint 2 is read instead")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "8"]
