"""A node's experts survive it: saved while they learn, restored to the bit, never mixed up with others."""

from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from dmoe_jax.checkpoints import CheckpointError
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
