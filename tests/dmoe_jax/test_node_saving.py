"""A node's experts survive it: saved while they learn, restored to the bit, never mixed up with others."""

import itertools
import os
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.checkpoints import CheckpointFiles
from dmoe_jax.experts import expert_from_functions
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.machine.disk import CheckpointError, FolderInUse
from dmoe_jax.mixture.expert_calls import REMEMBERED_S
from dmoe_jax.node import saving
from dmoe_jax.node.backend import LEAST_REMEMBERED, MOST_REMEMBERED, ExpertBackend
from dmoe_jax.node.programs import Batch, Result, Work
from dmoe_jax.node.saving import ExpertSaver
from dmoe_net.errors import CallRefused
from tests.dmoe_jax.node_rig import open_rig

kind_of, touch = saving._kind_of, saving._touch

OPTIMIZER = optax.adam(1e-2)
X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


def experts(*uids: str, d_model: int = 4, seed: int = 0) -> dict[str, ExpertBackend]:
    expert = feedforward(d_model=d_model)
    return {
        uid: ExpertBackend(expert, OPTIMIZER, expert.init(jax.random.key(seed + index)))
        for index, uid in enumerate(uids)
    }


def test_an_average_forgets_no_request() -> None:
    """A state that is put in between two batches leaves what the expert has learnt from; a saved one brings its own."""
    backend = experts("a.0")["a.0"]
    backend.backward([X], X, None, None, {b"first": 0.0})
    backend.load(jax.tree.map(np.array, backend.state), update_count=1)
    assert list(backend.learnt_from) == [b"first"]
    backend.load(jax.tree.map(np.array, backend.state), update_count=1, learnt_from=[b"saved"])
    assert list(backend.learnt_from) == [b"saved"]


def learns(backend: ExpertBackend, requests: dict[bytes, float]) -> None:
    """Have an expert learn from these requests, as its program says, without running it."""
    batch = Batch(inputs=(X,), output_grads=X, requests=requests)
    backend.outcome_of(Work(0, batch), Result((), np.array([True, True])))


def test_what_an_expert_has_learnt_is_remembered_for_a_minute() -> None:
    """However many others it learns from meanwhile; a thousand it always remembers, and never more than the most."""
    backend = experts("a.0")["a.0"]
    learn = lambda names, at: learns(backend, dict.fromkeys(names, at))  # noqa: E731
    learn([b"first"], 0.0)
    learn([b"%d" % number for number in range(3000)], 10.0)
    learn([b"later"], REMEMBERED_S - 1)
    assert b"first" in backend.learnt_from
    learn([b"late"], REMEMBERED_S + 1)
    assert b"first" not in backend.learnt_from
    assert len(backend.learnt_from) == 3002
    learn([b"much later"], 1000.0)
    assert len(backend.learnt_from) == LEAST_REMEMBERED
    learn([b"%d of many" % number for number in range(MOST_REMEMBERED + 1)], 1000.0)
    assert len(backend.learnt_from) == MOST_REMEMBERED


def test_what_was_learnt_before_a_restart_is_remembered_for_a_minute_after_it() -> None:
    """The clock of the process that learnt it is gone."""
    backend = experts("a.0")["a.0"]
    backend.load(jax.tree.map(np.array, backend.state), update_count=1, learnt_from=[b"before"])
    for number in range(3000):
        learns(backend, {b"%d" % number: 5.0 + number / 100})
    assert b"before" in backend.learnt_from
    learns(backend, {b"late": 5.1 + REMEMBERED_S})
    assert b"before" not in backend.learnt_from
    assert b"1000" in backend.learnt_from


@pytest.mark.parametrize("took_s", [0.5, 3.0])
async def test_no_checkpoint_is_older_than_the_period(
    took_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """The state at the beginning of a save is the newest on the disk until the next save has ended."""
    saves: list[tuple[float, float]] = []

    async def save(*, gives_way: bool = False) -> None:
        began = trio.current_time()
        await trio.sleep(took_s)
        saves.append((began, trio.current_time()))

    saver = ExpertSaver(tmp_path, {}, InlineDevice())
    monkeypatch.setattr(saver, "save", save)
    with trio.move_on_after(200.0):
        await saver.run(10.0)
    # The first two times it is not known yet how long a save takes.
    ages = [ended - began for (began, _), (_, ended) in itertools.pairwise(saves)]
    assert max(ages) <= 10.0 + 1e-9
    assert len(saves) > 200.0 / 10.0


async def test_saves_that_take_too_long_for_the_period_are_spoken_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: trio.testing.MockClock,
) -> None:
    """They take half of the time at most, and a warning says once how old checkpoints become."""

    async def save(*, gives_way: bool = False) -> None:
        await trio.sleep(8.0)

    saver = ExpertSaver(tmp_path, {}, InlineDevice())
    monkeypatch.setattr(saver, "save", save)
    with trio.move_on_after(200.0):
        await saver.run(10.0)
    assert [record.getMessage() for record in caplog.records] == [
        "saving the experts took 8 s: their checkpoints become up to 24 s old, not 10 as asked"
    ]


async def test_experts_go_on_where_they_were(tmp_path: Path) -> None:
    """After a restart the same gradient leads to the same parameters: Adam's moments came back too."""
    first = experts("a.0", "a.1")
    first["a.0"].backward([X], X)
    first["a.0"].backward([X], -X)
    first["a.1"].backward([X], X)
    await ExpertSaver(tmp_path, first, InlineDevice()).save()

    second = experts("a.0", "a.1", seed=50)
    assert await ExpertSaver(tmp_path, second, InlineDevice()).restore() == {"a.0": 2, "a.1": 1}
    assert [backend.update_count for backend in second.values()] == [2, 1]
    for uid in first:
        first[uid].backward([X], X)
        second[uid].backward([X], X)
        jax.tree.map(np.testing.assert_array_equal, first[uid].params, second[uid].params)


def saved(folder: Path) -> dict[str, list[int]]:
    """Numbers of updates at which there are checkpoints, by expert; nothing else lies there."""
    return {own.name: sorted(int(path.name) for path in own.iterdir()) for own in sorted(folder.iterdir())}


async def test_saving_follows_learning(tmp_path: Path) -> None:
    """Each expert is written when it has learnt, and only then; its newest two checkpoints are kept."""
    backends = experts("a.0", "a.1")
    saver = ExpertSaver(tmp_path, backends, InlineDevice())
    assert await saver.restore() == {}
    await saver.save()
    assert saved(tmp_path) == {}
    for expected in ([1], [1, 2], [2, 3]):
        backends["a.0"].backward([X], X)
        await saver.save()
        await saver.save()
        assert saved(tmp_path) == {"a.0": expected}
    backends["a.1"].backward([X], X)
    await saver.save()
    assert saved(tmp_path) == {"a.0": [2, 3], "a.1": [1]}


async def test_experts_that_come_and_go_are_saved_too(tmp_path: Path) -> None:
    """The experts are those that the node has when it saves."""
    backends = experts("a.0")
    saver = ExpertSaver(tmp_path, backends, InlineDevice())
    backends |= experts("a.1")
    del backends["a.0"]
    backends["a.1"].backward([X], X)
    await saver.save()
    assert saved(tmp_path) == {"a.1": [1]}


async def test_any_node_takes_up_any_expert(tmp_path: Path) -> None:
    """Two nodes save into one folder; a third one takes one expert of each, to the bit, and one that is new."""
    nodes = experts("a.0", "a.1"), experts("b.3.7", "b.3.8", seed=10)
    for backends in nodes:
        for backend in backends.values():
            backend.backward([X], X)
        await ExpertSaver(tmp_path, backends, InlineDevice()).save()
    third = experts("a.1", "b.3.7", "c.0", seed=50)
    fresh = jax.tree.map(np.asarray, third["c.0"].params)
    assert await ExpertSaver(tmp_path, third, InlineDevice()).restore() == {"a.1": 1, "b.3.7": 1}
    jax.tree.map(np.testing.assert_array_equal, third["a.1"].state, nodes[0]["a.1"].state)
    jax.tree.map(np.testing.assert_array_equal, third["b.3.7"].state, nodes[1]["b.3.7"].state)
    jax.tree.map(np.testing.assert_array_equal, third["c.0"].params, fresh)
    assert third["c.0"].update_count == 0


async def test_only_one_expert_is_copied_at_a_time(tmp_path: Path) -> None:
    """A turn of the device copies one expert, and it is on the disk before the next one is copied."""
    turns: list[tuple[str, int]] = []

    class Watched(InlineDevice):
        async def run(self, function: Any, *args: Any, **how: Any) -> Any:
            turns.append((function.__name__, sum(map(len, saved(tmp_path).values()))))
            return await super().run(function, *args, **how)

    backends = experts("a.0", "a.1", "a.2")
    for backend in backends.values():
        backend.backward([X], X)
    await ExpertSaver(tmp_path, backends, Watched()).save()
    assert turns == [("_kind_of", 0), ("_snapshot", 0), ("_snapshot", 1), ("_snapshot", 2)]


@pytest.mark.parametrize("where", ["host", "host, piece by piece", "device"])
async def test_a_snapshot_is_no_view(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """The copy stays as it was when updates reuse the expert's buffers, whatever they do to views of these."""
    if where == "device":  # as where arrays are not in the host's memory
        monkeypatch.setattr(saving, "_kind_of", lambda backend: (kind_of(backend)[0], False))
    elif where != "host":
        monkeypatch.setattr(saving, "_PIECE_BYTES", 16)
    touched: list[int] = []
    monkeypatch.setattr(saving, "_touch", lambda octets: (touched.append(octets.size), touch(octets)))

    class Learning(InlineDevice):
        async def aside(self, function: Any, *args: Any) -> Any:
            if function.__name__ == "_write":
                backends["a.0"].backward([X], X)
            return await super().aside(function, *args)

    backends = experts("a.0")
    backends["a.0"].backward([X], X)
    before = jax.tree.map(np.array, backends["a.0"].state)
    await ExpertSaver(tmp_path, backends, Learning()).save()
    assert backends["a.0"].update_count == 2
    assert bool(touched) == (where == "host, piece by piece")
    again = experts("a.0", seed=9)
    assert await ExpertSaver(tmp_path, again, InlineDevice()).restore() == {"a.0": 1}
    jax.tree.map(np.testing.assert_array_equal, again["a.0"].state, before)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere priorities are of whole processes")
@pytest.mark.parametrize(("gives_way", "is_large"), [(True, True), (True, False), (False, True)])
async def test_only_the_writer_of_a_large_expert_that_gives_way_comes_last(
    tmp_path: Path, gives_way: bool, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is whole all the same. At a node's end nobody computes any more, and there is little time; and who writes a
    small one holds the interpreter for most of it."""
    monkeypatch.setattr("dmoe_jax.node.saving._LARGE_BYTES", 1 if is_large else 1 << 20)
    niceness: list[int] = []
    write = CheckpointFiles.write

    def watched(self: CheckpointFiles, path: Path, state: Any, facts: Any) -> None:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        write(self, path, state, facts)

    monkeypatch.setattr(CheckpointFiles, "write", watched)
    backends = experts("a.0")
    backends["a.0"].backward([X], X)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    await ExpertSaver(tmp_path, backends, InlineDevice()).save(gives_way=gives_way)
    assert niceness == [15 if gives_way and is_large else own]
    assert own == os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert await ExpertSaver(tmp_path, experts("a.0", seed=9), InlineDevice()).restore() == {"a.0": 1}


async def test_other_experts_are_refused(tmp_path: Path) -> None:
    """A wider expert, or one with another optimiser, is not loaded by halves; nor is the folder of an old version."""
    backends = experts("a.0")
    backends["a.0"].backward([X], X)
    await ExpertSaver(tmp_path, backends, InlineDevice()).save()
    wider = experts("a.0", d_model=8)
    before = wider["a.0"].params
    with pytest.raises(CheckpointError, match=r"checkpoint .*a.0/1 is of another model"):
        await ExpertSaver(tmp_path, wider, InlineDevice()).restore()
    assert wider["a.0"].params is before
    (tmp_path / "old" / "120").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="old holds checkpoints of an earlier version, among them 120"):
        ExpertSaver(tmp_path / "old", backends, InlineDevice())


async def test_nothing_replaces_the_last_good_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An expert that is not finite is not saved, and the log says which it is; the others are."""
    backends = experts("a.0", "a.1")
    saver = ExpertSaver(tmp_path, backends, InlineDevice())
    for backend in backends.values():
        backend.backward([X], X)
    await saver.save()
    backends["a.0"].backward([X], X)
    poison(backends["a.1"], updates=2)
    await saver.save()
    assert saved(tmp_path) == {"a.0": [1, 2], "a.1": [1]}
    assert "expert a.1 is not finite: it is not saved" in caplog.text


async def test_a_poisoned_checkpoint_is_not_taken_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Written by other means, say: the one before it is taken up; without one the expert starts afresh."""
    old = experts("a.0", "a.1")
    files = CheckpointFiles()
    for uid, backend in old.items():
        backend.backward([X], X)
        if uid == "a.0":
            files.write(tmp_path / uid / "1", backend.state, {"updates": 1})
            good = jax.tree.map(np.array, backend.state)
        poison(backend)
        files.write(tmp_path / uid / "2", backend.state, {"updates": 2})
    new = experts("a.0", "a.1", seed=20)
    fresh = jax.tree.map(np.asarray, new["a.1"].params)
    assert await ExpertSaver(tmp_path, new, InlineDevice()).restore() == {"a.0": 1}
    jax.tree.map(np.testing.assert_array_equal, new["a.0"].state, good)
    jax.tree.map(np.testing.assert_array_equal, new["a.1"].params, fresh)
    assert "a.0/2 is not finite; it is kept as set-aside-2; checkpoint 1 is taken" in caplog.text
    assert "no checkpoint of expert a.1 can be used: it starts afresh" in caplog.text


async def test_what_a_killed_writer_left_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unfinished checkpoints are not read and are cleared away; one whose files are gone gives way to an older one."""
    backends = experts("a.0")
    saver = ExpertSaver(tmp_path, backends, InlineDevice())
    for _ in range(2):
        backends["a.0"].backward([X], X)
        await saver.save()
    (tmp_path / "a.0" / "3.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "a.0" / "3.orbax-checkpoint-tmp" / "half").write_text("x")
    (tmp_path / "a.0" / ".old-1").mkdir()
    (tmp_path / "a.0" / "2" / "facts" / "metadata").unlink()
    again = experts("a.0", seed=9)
    saver = ExpertSaver(tmp_path, again, InlineDevice())
    assert await saver.restore() == {"a.0": 1}
    assert "a.0/2 cannot be read: facts/metadata is damaged or gone; it is kept as set-aside-2" in caplog.text
    (tmp_path / "a.0" / "set-aside-2").rename(tmp_path / "kept")
    for _ in range(2):  # updates 2, which cannot be read, and 3, which was left half
        again["a.0"].backward([X], X)
        await saver.save()
    again["a.0"].backward([X], X)
    await saver.save()
    assert sorted(path.name for path in (tmp_path / "a.0").iterdir()) == ["3", "4"]


async def test_what_cannot_be_written_does_not_keep_others_from_it(tmp_path: Path) -> None:
    """The error says how many and which; once there is room they are written."""
    backends = experts("a.0", "a.1")
    saver = ExpertSaver(tmp_path, backends, InlineDevice())
    for backend in backends.values():
        backend.backward([X], X)
    (tmp_path / "a.0").write_text("a file is in the way")
    with pytest.raises(CheckpointError, match=r"1 of 2 experts could not be saved, among them a\.0: "):
        await saver.save()
    (tmp_path / "a.0").unlink()
    assert saved(tmp_path) == {"a.1": [1]}
    await saver.save()
    assert saved(tmp_path) == {"a.0": [1], "a.1": [1]}


async def test_what_is_learnt_after_damage_is_found_at_the_next_start(tmp_path: Path) -> None:
    """Though its numbers are lower than those of the checkpoints that cannot be read."""

    async def life(updates: int) -> int:
        """One node; the updates that it found."""
        backends = experts("a.0")
        saver = ExpertSaver(tmp_path, backends, InlineDevice())
        found = (await saver.restore()).get("a.0", 0)
        for _ in range(updates):
            backends["a.0"].backward([X], X)
            await saver.save()
        return found

    await life(8)
    for number in ("7", "8"):
        (tmp_path / "a.0" / number / "facts" / "metadata").write_text("")
    assert await life(3) == 0
    assert await life(1) == 3
    assert await life(0) == 4


@pytest.mark.skipif(sys.platform == "win32", reason="nobody is kept out there")
async def test_one_node_at_a_time_saves_an_expert(tmp_path: Path) -> None:
    """A second one that is to serve it by itself is told who does; other experts may lie beside it."""
    first = ExpertSaver(tmp_path, experts("a.0", "a.1"), InlineDevice())
    await first.restore(alone=True)
    with pytest.raises(
        FolderInUse, match=rf"the saving of the expert in .*a\.1 is under way: process {os.getpid()} on "
    ):
        await ExpertSaver(tmp_path, experts("a.2", "a.1"), InlineDevice()).restore(alone=True)
    third = ExpertSaver(tmp_path, experts("a.2"), InlineDevice())
    await third.restore(alone=True)
    third.close()
    first.close()
    second = ExpertSaver(tmp_path, experts("a.2", "a.1"), InlineDevice())
    await second.restore(alone=True)
    second.close()


def poison(backend: ExpertBackend, *, updates: int | None = None) -> None:
    state = jax.tree.map(np.array, backend.state)
    state["params"]["Dense_0"]["bias"][0] = np.nan
    backend.load(state, update_count=backend.update_count if updates is None else updates)


async def test_a_full_disk_does_not_stop_the_node(
    tmp_path: Path,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is reported once, and tried again."""
    backends = experts("a.0")
    saver = ExpertSaver(tmp_path, backends, InlineDevice())
    tries = []

    async def save(*, gives_way: bool) -> None:
        assert gives_way
        tries.append(trio.current_time())
        raise CheckpointError("RESOURCE_EXHAUSTED: no space left")

    monkeypatch.setattr(saver, "save", save)
    with trio.move_on_after(25.0):
        await saver.run(10.0)
    assert tries == pytest.approx([5.0, 11.0, 17.8])  # what a save may take is allowed for less and less
    assert [record.getMessage() for record in caplog.records] == [
        "RESOURCE_EXHAUSTED: no space left; the node goes on, and tries again every 10 s"
    ]


async def test_random_keys_in_a_state_are_saved(tmp_path: Path) -> None:
    """An optimiser that draws noise draws the same after a restart."""

    def noisy() -> dict[str, ExpertBackend]:
        expert = feedforward(d_model=4)
        optimizer = optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(0.1))
        return {"a.0": ExpertBackend(expert, optimizer, expert.init(jax.random.key(0)))}

    first, second = noisy(), noisy()
    first["a.0"].backward([X], X)
    await ExpertSaver(tmp_path, first, InlineDevice()).save()
    await ExpertSaver(tmp_path, second, InlineDevice()).restore()
    for backends in (first, second):
        backends["a.0"].backward([X], X)
    jax.tree.map(np.testing.assert_array_equal, first["a.0"].state, second["a.0"].state)


SCALE = expert_from_functions(
    lambda key: {"w": jnp.zeros(64)}, lambda params, x: x * params["w"], jnp.ones((1, 64)), name="scale"
)
"""Exactly linear: a gradient of the output that is 1 at i, for an input of ones, has SGD take 1 off weight i."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_is_learnt_twice_through_fifty_kills(tmp_path: Path, seed: int) -> None:
    """Each request has a weight of its own; after fifty lives that end between two calls, most of them with updates
    that are not saved, and retries of what was answered or not, weight i is 0 or -1, and -1 if the expert was saved
    after the answer."""

    async def life(rng: np.random.Generator, life_number: int, sure: set[int]) -> None:
        """One node, from its checkpoint until it is killed; its trainer asks again what it asked the last ones."""
        backend = ExpertBackend(SCALE, optax.sgd(1.0), SCALE.init(jax.random.key(0)))
        saver = ExpertSaver(tmp_path, {"s.0": backend}, InlineDevice())
        await saver.restore()
        async with open_rig(backends={"s.0": backend}) as rig:
            weights = np.asarray(backend.params["w"])
            assert set(weights) <= {0, -1}
            assert set(np.flatnonzero(weights)) >= sure
            answered = set(np.flatnonzero(weights))
            for index in rng.permutation(np.arange(max(0, life_number - 8), life_number + 1)):
                grads = np.eye(64, dtype=np.float32)[[index]]
                is_known = index in answered
                with pytest.raises(CallRefused, match="has learnt from") if is_known else nullcontext():
                    await rig.backward("s.0", b"%016d" % index, np.ones((1, 64), np.float32), grads)
                answered.add(index)
                if rng.random() < 0.2:
                    await saver.save()
                    sure |= answered

    async def main() -> None:
        rng, sure = np.random.default_rng(seed), set[int]()
        for number in range(50):
            await life(rng, number, sure)
        assert len(sure) > 30

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_nothing_is_learnt_twice_though_many_others_came_between(autojump_clock: trio.testing.MockClock) -> None:
    """More requests than a node remembers the answers of: a retry is refused, and changes nothing."""
    backend = ExpertBackend(SCALE, optax.sgd(1.0), SCALE.init(jax.random.key(0)))
    async with open_rig(backends={"s.0": backend}) as rig:
        x, grads = np.ones((1, 64), np.float32), np.eye(64, dtype=np.float32)[[5]]
        await rig.backward("s.0", b"the first", x, grads)
        for start in range(0, 1100, 100):
            async with trio.open_nursery() as nursery:
                for number in range(start, start + 100):
                    nursery.start_soon(rig.backward, "s.0", b"%d" % number, x, 0 * grads)
        with pytest.raises(CallRefused, match="has learnt from"):
            await rig.backward("s.0", b"the first", x, grads)
        assert np.asarray(backend.params["w"]).tolist() == [-1.0 if index == 5 else 0.0 for index in range(64)]
