"""Checkpoints are whole or absent, the newest wins, and another model's is refused by name."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.checkpoints import Checkpoints, host_copy
from dmoe_jax.disk import CheckpointError


def state_at(step: int) -> dict:
    params = {"w": np.full((2, 3), step, np.float32), "b": np.arange(3, dtype=np.float32)}
    return {"params": params, "opt": optax.adam(1e-3).init(params)}


def test_newest_is_restored_and_few_are_kept(tmp_path: Path) -> None:
    """Of three saves two stay, and the latest comes back with its facts and its optimiser state."""
    checkpoints = Checkpoints(tmp_path / "new" / "folder", keep=2)
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
    """What a killed writer leaves behind is passed over."""
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
