"""A node's experts survive it: saved while they learn, restored to the bit, never mixed up with others."""

import functools
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
from dmoe_jax.experts import Expert, expert_from_functions
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.machine.disk import CheckpointError, FolderInUse
from dmoe_jax.mixture.expert_calls import REMEMBERED_S
from dmoe_jax.node import saving
from dmoe_jax.node.backend import LEAST_REMEMBERED, MOST_REMEMBERED, ExpertBackend, make_backends
from dmoe_jax.node.programs import Batch, Result, Work
from dmoe_jax.node.saving import ExpertSaver
from dmoe_net.errors import CallRefused
from tests.dmoe_jax.node_rig import open_rig

OPTIMIZER = optax.chain(optax.add_noise(0.1, 0.5, 3), optax.adam(1e-2))
"""With moments, and with random keys in its state."""
X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


@functools.cache
def scale(size: int) -> Expert:
    """Exactly linear: a gradient of the output that is 1 at i, for an input of ones, has SGD take 1 off weight i."""

    def apply(params: Any, x: Any) -> Any:
        return x * params["w"][:64]

    return expert_from_functions(lambda key: {"w": jnp.zeros(size)}, apply, jnp.ones((1, 64)), name="scale")


SCALE, LARGE = scale(64), 1 << 23
"""An expert; and the size of one of 32 MB, which is copied in pieces and written by a thread of its own."""


def check_equal(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def experts(*uids: str, d_model: int = 4, seed: int = 0, learn: int = 0) -> dict[str, ExpertBackend]:
    """New experts, which have learnt so many times."""
    backends = make_backends(dict.fromkeys(uids, feedforward(d_model=d_model)), OPTIMIZER, seed=seed)
    for backend in backends.values():
        for _ in range(learn):
            backend.backward([X], X)
    return backends


def test_what_an_expert_has_learnt_is_remembered_for_a_minute() -> None:
    """An expert remembers a thousand requests at least, and those of a minute up to a bound, restarts included."""
    backend = experts("a.0")["a.0"]

    def learn(at: float, *names: bytes) -> None:
        """Have the expert learn from these requests, as its program says, without running it."""
        batch = Batch(inputs=(X,), output_grads=X, requests=dict.fromkeys(names, at))
        backend.outcome_of(Work(0, batch), Result((), np.array([True, True])))

    learn(0.0, b"first")
    learn(10.0, *(b"%d" % number for number in range(3000)))
    learn(REMEMBERED_S - 1, b"later")
    state = jax.tree.map(np.array, backend.state)
    backend.load(state, update_count=1)
    assert b"first" in backend.learnt_from
    learn(REMEMBERED_S + 1, b"late")
    assert b"first" not in backend.learnt_from
    assert len(backend.learnt_from) == 3002
    learn(1000.0, b"much later")
    assert len(backend.learnt_from) == LEAST_REMEMBERED
    learn(1000.0, *(b"%d of many" % number for number in range(MOST_REMEMBERED + 1)))
    assert len(backend.learnt_from) == MOST_REMEMBERED
    backend = experts("a.0")["a.0"]
    backend.load(state, update_count=1, learnt_from=[b"before"])
    assert list(backend.learnt_from) == [b"before"]
    for number in range(3000):
        learn(5.0 + number / 100, b"%d" % number)
    assert b"before" in backend.learnt_from
    learn(5.1 + REMEMBERED_S, b"late")
    assert b"before" not in backend.learnt_from
    assert b"1000" in backend.learnt_from


class TimedSaver(ExpertSaver):
    """Saves nothing, which takes some time of its own, or fails."""

    def __init__(self, folder: Path, took_s: float, fails: bool = False) -> None:
        super().__init__(folder, {}, InlineDevice())
        self.took_s, self.fails = took_s, fails
        self.saves: list[tuple[float, float]] = []

    async def save(self, *, gives_way: bool = False) -> None:
        assert gives_way
        began = trio.current_time()
        await trio.sleep(self.took_s)
        self.saves.append((began, trio.current_time()))
        if self.fails:
            raise CheckpointError("RESOURCE_EXHAUSTED: no space left")


@pytest.mark.parametrize("took_s", [0.5, 3.0])
async def test_no_checkpoint_is_older_than_the_period(took_s: float, tmp_path: Path, autojump_clock: Any) -> None:
    """The state at the beginning of a save is the newest on the disk until the next save has ended."""
    saver = TimedSaver(tmp_path, took_s)
    with trio.move_on_after(200.0):
        await saver.run(10.0)
    # The first two times it is not known yet how long a save takes.
    ages = [ended - began for (began, _), (_, ended) in itertools.pairwise(saver.saves)]
    assert max(ages) <= 10.0 + 1e-9
    assert len(saver.saves) > 200.0 / 10.0


async def test_trouble_with_saving_is_told_once(tmp_path: Path, caplog: Any, autojump_clock: Any) -> None:
    """Saves that take too long rest as long, and a warning tells it; a full disk does not stop the node."""
    full = TimedSaver(tmp_path, 0.0, fails=True)
    for saver, seconds in ((TimedSaver(tmp_path, 8.0), 200.0), (full, 25.0)):
        began = trio.current_time()
        with trio.move_on_after(seconds):
            await saver.run(10.0)
    tries = [at - began for at, _ in full.saves]
    assert tries == pytest.approx([5.0, 11.0, 17.8])  # what a save may take is allowed for less and less
    assert [record.getMessage() for record in caplog.records] == [
        "saving the experts took 8 s: their checkpoints become up to 24 s old, not 10 as asked",
        "RESOURCE_EXHAUSTED: no space left; the node goes on, and tries again every 10 s",
    ]


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
    del backends["a.0"]  # experts may come and go
    backends |= experts("a.2", learn=1)
    await saver.save()
    assert saved(tmp_path) == {"a.0": [2, 3], "a.1": [1], "a.2": [1]}


async def test_any_node_takes_up_any_expert(tmp_path: Path) -> None:
    """Two nodes save into one folder; a third one takes one expert of each, to the bit, and one that is new."""
    nodes = experts("a.0", "a.1", learn=2), experts("b.3.7", "b.3.8", seed=10, learn=1)
    for backends in nodes:
        await ExpertSaver(tmp_path, backends, InlineDevice()).save()
    third, fresh = (experts("a.1", "b.3.7", "c.0", seed=50) for _ in range(2))
    assert await ExpertSaver(tmp_path, third, InlineDevice()).restore() == {"a.1": 2, "b.3.7": 1}
    for uid, backend in {"a.1": nodes[0]["a.1"], "b.3.7": nodes[1]["b.3.7"], "c.0": fresh["c.0"]}.items():
        assert third[uid].update_count == backend.update_count
        check_equal(third[uid].state, backend.state)
        for each in (third[uid], backend):  # the same gradient leads to the same state, noise included
            each.backward([X], X)
        check_equal(third[uid].state, backend.state)


async def test_only_one_expert_is_copied_at_a_time(tmp_path: Path) -> None:
    """A turn of the device copies one expert, and it is on the disk before the next one is copied."""
    turns: list[tuple[str, int]] = []

    class Watched(InlineDevice):
        async def run(self, function: Any, *args: Any, **how: Any) -> Any:
            turns.append((function.__name__, sum(map(len, saved(tmp_path).values()))))
            return await super().run(function, *args, **how)

    await ExpertSaver(tmp_path, experts("a.0", "a.1", "a.2", learn=1), Watched()).save()
    assert turns == [("_kind_of", 0), ("_snapshot", 0), ("_snapshot", 1), ("_snapshot", 2)]


@pytest.mark.parametrize("kind", ["small", "large", "of another device"])
async def test_a_snapshot_is_no_view(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy stays as it was when updates reuse the expert's buffers, whatever they do to views of these."""
    kind_of, expert = saving._kind_of, scale(LARGE) if kind == "large" else SCALE
    if kind == "of another device":  # as where arrays are not in the host's memory
        monkeypatch.setattr(saving, "_kind_of", lambda backend: (kind_of(backend)[0], False))
    backends, again = (make_backends({"a.0": expert}, optax.sgd(1.0), seed=0) for _ in range(2))
    x = np.ones((1, 64), np.float32)

    class Learning(InlineDevice):
        async def aside(self, function: Any, *args: Any) -> Any:
            if function.__name__ == "_write":
                backends["a.0"].backward([x], x)
            return await super().aside(function, *args)

    backends["a.0"].backward([x], x)
    before = jax.tree.map(np.array, backends["a.0"].state)
    await ExpertSaver(tmp_path, backends, Learning()).save()
    assert backends["a.0"].update_count == 2
    assert await ExpertSaver(tmp_path, again, InlineDevice()).restore() == {"a.0": 1}
    check_equal(again["a.0"].state, before)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere priorities are of whole processes")
@pytest.mark.parametrize(("gives_way", "is_large"), [(True, True), (True, False), (False, True)])
async def test_only_the_writer_of_a_large_expert_that_gives_way_comes_last(
    tmp_path: Path, gives_way: bool, is_large: bool
) -> None:
    """At a node's end there is little time; to write a small one holds the interpreter for most of it."""
    backends, again = (make_backends({"a.0": scale(LARGE if is_large else 64)}, None, seed=0) for _ in range(2))
    backends["a.0"].load(jax.tree.map(np.array, backends["a.0"].state), update_count=1)
    saver = ExpertSaver(tmp_path, backends, InlineDevice())
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    before = set(threading.enumerate())
    await saver.save(gives_way=gives_way)
    writers = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("dmoe-writer")]
    niceness = [os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in writers]
    assert niceness == ([15] if gives_way and is_large else [])
    assert own == os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    saver.close()
    assert await ExpertSaver(tmp_path, again, InlineDevice()).restore() == {"a.0": 1}


async def test_other_experts_are_refused(tmp_path: Path) -> None:
    """A wider expert is not loaded by halves; nor is the folder of an old version."""
    backends = experts("a.0", learn=1)
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
    backends = experts("a.0", "a.1", learn=1)
    saver = ExpertSaver(tmp_path, backends, InlineDevice())
    await saver.save()
    backends["a.0"].backward([X], X)
    poison(backends["a.1"], updates=2)
    await saver.save()
    assert saved(tmp_path) == {"a.0": [1, 2], "a.1": [1]}
    assert "expert a.1 is not finite: it is not saved" in caplog.text


async def test_a_poisoned_checkpoint_is_not_taken_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Written by other means, say: the one before it is taken up; without one the expert starts afresh."""
    old, files = experts("a.0", "a.1", learn=1), CheckpointFiles()
    good = jax.tree.map(np.array, old["a.0"].state)
    files.write(tmp_path / "a.0" / "1", good, {"updates": 1})
    for uid, backend in old.items():
        poison(backend)
        files.write(tmp_path / uid / "2", backend.state, {"updates": 2})
    new, fresh = (experts("a.0", "a.1", seed=20) for _ in range(2))
    assert await ExpertSaver(tmp_path, new, InlineDevice()).restore() == {"a.0": 1}
    check_equal(new["a.0"].state, good)
    check_equal(new["a.1"].params, fresh["a.1"].params)
    assert "a.0/2 is not finite; it is kept as set-aside-2; checkpoint 1 is taken" in caplog.text
    assert "no checkpoint of expert a.1 can be used: it starts afresh" in caplog.text


async def test_what_a_killed_writer_left_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unfinished checkpoints are not read and are cleared away; one whose files are gone gives way to an older one."""
    backends, again, own = experts("a.0"), experts("a.0", seed=9), tmp_path / "a.0"

    async def learn(saver: ExpertSaver, backend: ExpertBackend, times: int) -> None:
        for _ in range(times):
            backend.backward([X], X)
            await saver.save()

    await learn(ExpertSaver(tmp_path, backends, InlineDevice()), backends["a.0"], 2)
    (own / "3.orbax-checkpoint-tmp").mkdir()
    (own / "3.orbax-checkpoint-tmp" / "half").write_text("x")
    (own / ".old-1").mkdir()
    (own / "2" / "facts" / "metadata").unlink()
    saver = ExpertSaver(tmp_path, again, InlineDevice())
    assert await saver.restore() == {"a.0": 1}
    assert "a.0/2 cannot be read: facts/metadata is damaged or gone; it is kept as set-aside-2" in caplog.text
    (own / "set-aside-2").rename(tmp_path / "kept")
    await learn(saver, again["a.0"], 3)  # updates 2, which cannot be read, 3, which was left half, and 4
    assert sorted(path.name for path in own.iterdir()) == ["3", "4"]


async def test_what_cannot_be_written_does_not_keep_others_from_it(tmp_path: Path) -> None:
    """The error says how many and which; once there is room they are written."""
    backends = experts("a.0", "a.1", learn=1)
    saver = ExpertSaver(tmp_path, backends, InlineDevice())
    (tmp_path / "a.0").write_text("a file is in the way")
    with pytest.raises(CheckpointError, match=r"1 of 2 experts could not be saved, among them a\.0: "):
        await saver.save()
    (tmp_path / "a.0").unlink()
    assert saved(tmp_path) == {"a.1": [1]}
    await saver.save()
    assert saved(tmp_path) == {"a.0": [1], "a.1": [1]}


@pytest.mark.skipif(sys.platform == "win32", reason="nobody is kept out there")
async def test_one_node_at_a_time_saves_an_expert(tmp_path: Path) -> None:
    """A second one that is to serve it by itself is told who does; other experts may lie beside it."""

    async def begin(*uids: str) -> ExpertSaver:
        saver = ExpertSaver(tmp_path, experts(*uids), InlineDevice())
        await saver.restore(alone=True)
        return saver

    first, told = await begin("a.0", "a.1"), rf"expert in .*a\.1 is under way: process {os.getpid()} on "
    with pytest.raises(FolderInUse, match=told):
        await begin("a.2", "a.1")
    (await begin("a.2")).close()
    first.close()
    (await begin("a.2", "a.1")).close()


def poison(backend: ExpertBackend, *, updates: int | None = None) -> None:
    state = jax.tree.map(np.array, backend.state)
    state["params"]["Dense_0"]["bias"][0] = np.nan
    backend.load(state, update_count=backend.update_count if updates is None else updates)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_is_learnt_twice_through_fifty_kills(tmp_path: Path, seed: int) -> None:
    """Each request has a weight of its own, which is -1 or 0 after fifty lives, and -1 if it was saved."""

    async def life(rng: np.random.Generator, life_number: int, sure: set[int]) -> None:
        """One node, from its checkpoint until it is killed; its trainer asks again what it asked the last ones."""
        backends = make_backends({"s.0": SCALE}, optax.sgd(1.0), seed=0)
        saver = ExpertSaver(tmp_path, backends, InlineDevice())
        await saver.restore()
        async with open_rig(backends=backends) as rig:
            weights = np.asarray(backends["s.0"].params["w"])
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
    async with open_rig(backends=make_backends({"s.0": SCALE}, optax.sgd(1.0), seed=0)) as rig:
        x, grads = np.ones((1, 64), np.float32), np.eye(64, dtype=np.float32)[[5]]
        await rig.backward("s.0", b"the first", x, grads)
        for start in range(0, 1100, 100):
            async with trio.open_nursery() as nursery:
                for number in range(start, start + 100):
                    nursery.start_soon(rig.backward, "s.0", b"%d" % number, x, 0 * grads)
        with pytest.raises(CallRefused, match="has learnt from"):
            await rig.backward("s.0", b"the first", x, grads)
        np.testing.assert_array_equal(rig.backends["s.0"].params["w"], -grads[0])
