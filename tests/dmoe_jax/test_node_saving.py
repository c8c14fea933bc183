"""A node's experts survive it: saved while they learn, restored to the bit, never mixed up with others."""

from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.checkpoints import CheckpointError, Checkpoints
from dmoe_jax.device import InlineDevice
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.saving import ExpertSaver

OPTIMIZER = optax.adam(1e-2)
X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


def experts(*uids: str, d_model: int = 4, seed: int = 0) -> dict[str, ExpertBackend]:
    expert = feedforward(d_model=d_model)
    return {
        uid: ExpertBackend(expert, OPTIMIZER, expert.init(jax.random.key(seed + index)))
        for index, uid in enumerate(uids)
    }


async def test_experts_go_on_where_they_were(tmp_path: Path) -> None:
    """After a restart the same gradient leads to the same parameters: Adam's moments came back too."""
    first = experts("a.0", "a.1")
    first["a.0"].backward([X], X)
    first["a.0"].backward([X], -X)
    first["a.1"].backward([X], X)
    await ExpertSaver(tmp_path, first, InlineDevice()).save()

    second = experts("a.0", "a.1", seed=50)
    assert ExpertSaver(tmp_path, second, InlineDevice()).restore() == 3
    assert [backend.update_count for backend in second.values()] == [2, 1]
    for uid in first:
        first[uid].backward([X], X)
        second[uid].backward([X], X)
        jax.tree.map(np.testing.assert_array_equal, first[uid].params, second[uid].params)


def saved_updates(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir())


async def test_saving_follows_learning(tmp_path: Path) -> None:
    """One checkpoint for each state that was learnt, none while experts rest; the newest two are kept."""
    backends = experts("a.0")
    saver = ExpertSaver(tmp_path, backends, InlineDevice())
    assert saver.restore() is None
    for expected in ([1], [1, 2], [2, 3]):
        backends["a.0"].backward([X], X)
        await saver.save()
        await saver.save()
        assert saved_updates(tmp_path) == expected


async def test_other_experts_are_refused(tmp_path: Path) -> None:
    """A folder of other uids, or of wider experts, is not loaded by halves."""
    backends = experts("a.0")
    backends["a.0"].backward([X], X)
    await ExpertSaver(tmp_path, backends, InlineDevice()).save()
    with pytest.raises(CheckpointError, match=r"another model: \['a.0'\].* is int32\[\], expected nothing"):
        ExpertSaver(tmp_path, experts("a.1"), InlineDevice()).restore()
    wider = experts("a.0", d_model=8)
    before = wider["a.0"].params
    with pytest.raises(CheckpointError, match="another model"):
        ExpertSaver(tmp_path, wider, InlineDevice()).restore()
    assert wider["a.0"].params is before


async def test_nothing_replaces_the_last_good_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While an expert is not finite, nothing is saved, and the log says which expert it is."""
    backends = experts("a.0", "a.1")
    saver = ExpertSaver(tmp_path, backends, InlineDevice())
    backends["a.0"].backward([X], X)
    await saver.save()
    poison(backends["a.1"])
    backends["a.0"].backward([X], X)
    await saver.save()
    assert saved_updates(tmp_path) == [1]
    assert "not finite: a.1" in caplog.text


async def test_a_poisoned_checkpoint_is_not_taken_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of an earlier version, say: the expert starts afresh with a warning, the others go on where they were."""
    old = experts("a.0", "a.1")
    old["a.0"].backward([X], X)
    poison(old["a.1"])
    updates = {uid: backend.update_count for uid, backend in old.items()}
    state = {uid: backend.state for uid, backend in old.items()}
    Checkpoints(tmp_path).save(1, state, {"updates": updates})
    new = experts("a.0", "a.1", seed=20)
    fresh = jax.tree.map(np.asarray, new["a.1"].params)
    assert ExpertSaver(tmp_path, new, InlineDevice()).restore() == 1
    jax.tree.map(np.testing.assert_array_equal, new["a.1"].params, fresh)
    jax.tree.map(np.testing.assert_array_equal, new["a.0"].params, old["a.0"].params)
    assert "expert a.1 is not finite in its checkpoint; it starts afresh" in caplog.text


def poison(backend: ExpertBackend) -> None:
    state = jax.tree.map(np.array, backend.state)
    state["params"]["Dense_0"]["bias"][0] = np.nan
    backend.load(state, update_count=backend.update_count)


async def test_a_full_disk_does_not_stop_the_node(
    tmp_path: Path,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Orbax raises ValueError then; it is reported, and tried again."""
    backends = experts("a.0")
    saver = ExpertSaver(tmp_path, backends, InlineDevice())
    tries = []

    async def save() -> None:
        tries.append(trio.current_time())
        raise ValueError("RESOURCE_EXHAUSTED: no space left")

    monkeypatch.setattr(saver, "save", save)
    with trio.move_on_after(25.0):
        await saver.run(10.0)
    assert len(tries) == 2
    assert "RESOURCE_EXHAUSTED" in caplog.text


async def test_random_keys_in_a_state_are_saved(tmp_path: Path) -> None:
    """An optimiser that draws noise draws the same after a restart."""

    def noisy() -> dict[str, ExpertBackend]:
        expert = feedforward(d_model=4)
        optimizer = optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(0.1))
        return {"a.0": ExpertBackend(expert, optimizer, expert.init(jax.random.key(0)))}

    first, second = noisy(), noisy()
    first["a.0"].backward([X], X)
    await ExpertSaver(tmp_path, first, InlineDevice()).save()
    ExpertSaver(tmp_path, second, InlineDevice()).restore()
    for backends in (first, second):
        backends["a.0"].backward([X], X)
    jax.tree.map(np.testing.assert_array_equal, first["a.0"].state, second["a.0"].state)
