"""The run loop: pauses where they belong, an end that can be gone on from, and nothing in the metrics twice."""

import errno
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import trio

import dmoe_jax.runs
from dmoe_jax.arrays import host_copy
from dmoe_jax.autodiff import without_waiting
from dmoe_jax.checkpoints import Checkpoints, numbers_in, read_arrays
from dmoe_jax.cli import main
from dmoe_jax.data.vocabulary import unigram_perplexity
from dmoe_jax.machine.disk import CheckpointError, FolderInUse
from dmoe_jax.model import Evaluation
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.trainer import StepRecord
from dmoe_jax.training.engine import Engine, OnBatch, OnLost, OnStep, Totals
from dmoe_jax.training.prepared_run import CHECKPOINT_FOLDER, best_step, finished_headline, prepare_run
from dmoe_jax.training.progress import TrainingProgress, describe_failures
from dmoe_jax.training.run import Plan, train
from dmoe_jax.training.task import Task, language_task
from tests.experiments.small_runs import VOCAB_SIZE, small_corpus


@dataclass(eq=False)
class CountingEngine:
    """Its state is the sum of the steps; its perplexity that sum. Every second step goes to expert layer0.1."""

    name = "counting"
    layers: ClassVar = {"layer0": ("layer0.0", "layer0.1")}
    fails_at: int | None = None
    error: BaseException = field(default_factory=KeyboardInterrupt)
    step_s: float = 0.0
    evaluation_s: float = 0.0
    around: Callable[[int], Any] = lambda step: nullcontext()
    """A context for the word of each step."""
    step: int = 0
    sum: np.ndarray = field(default_factory=lambda: np.zeros(1))
    stretches: list[int] = field(default_factory=list)
    evaluated: list[tuple[str, int | None]] = field(default_factory=list)

    async def advance(self, num_steps: int, on_step: OnStep, on_lost: OnLost) -> None:
        self.stretches.append(num_steps)
        for _ in range(num_steps):
            if self.step == self.fails_at:
                raise self.error
            if self.step_s:  # else there may be no event loop
                await trio.sleep(self.step_s)
            self.step += 1
            self.sum = self.sum + self.step
            with self.around(self.step):
                on_step(StepRecord(step=self.step, trainer=0, loss=1.0, items=10, staleness=2))

    async def evaluate(self, split: str, *, max_items: int | None, on_batch: OnBatch) -> Evaluation:
        self.evaluated.append((split, max_items))
        found = self.sum[0]
        if self.evaluation_s:
            await trio.sleep(self.evaluation_s)
        on_batch(1, 1)
        targets = getattr(small_corpus(), split)[1:]
        return Evaluation(loss=math.log(max(found, 1.0)), items=targets.size, targets=targets)

    def state(self) -> Any:
        return {"sum": self.sum}

    async def snapshot(self) -> tuple[int, Any]:
        return self.step, host_copy(self.state())

    def facts(self) -> dict[str, Any]:
        return {}

    def load(self, step: int, state: Any, facts: Mapping[str, Any]) -> None:
        self.sum, self.step = np.array(state["sum"]), step

    def totals(self) -> Totals:
        odd, failures = (self.step + 1) // 2, {"timeout": self.step} if self.step else {}
        counts = {"items": 10 * self.step, "staleness": 2 * self.step, "calls_ok": 3 * self.step, "failures": failures}
        load = {"layer0.0": odd, "layer0.1": self.step - odd}
        return Totals(**counts, steps_lost=self.step // 4, virtual_s=0.5 * self.step, load=load)


def count(folder: Path, engine: CountingEngine, *, steps: int = 10, resume: bool = False, **plan: Any) -> dict:
    """A run of the counting engine: pauses after 4 and 8 steps."""
    settings = Plan(**{"steps": steps, "eval_every": 4, "eval_items": 50, "pause": True} | plan)
    run, progress = prepare_run(folder, {"steps": steps}, resume=resume), TrainingProgress(steps)
    task = language_task(small_corpus(), splits=("valid", "test"))
    return without_waiting(train(engine, run, settings, task, progress, facts={"model": "counting"}))


async def count_beside(folder: Path, engine: CountingEngine, *, resume: bool = False, **plan: Any) -> dict:
    """A run that is evaluated and saved beside its training, every four steps."""
    settings = Plan(**{"steps": 10, "eval_every": 4, "eval_items": 50, "checkpoint_every": 4} | plan)
    run = prepare_run(folder, {}, resume=resume)
    return await train(engine, run, settings, language_task(small_corpus()), TrainingProgress(10))


@pytest.fixture(autouse=True)
def quick_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty figure: a real one takes a second, and one test below has it drawn."""
    monkeypatch.setattr("dmoe_jax.training.run.training_figure", lambda metrics, path, title: path.write_bytes(b""))


def records(folder: Path, kind: str, *fields: str) -> list[tuple[Any, ...]]:
    found = [record for record in RunFolder(folder).metrics() if record["kind"] == kind]
    return [tuple(record.get(field) for field in fields) for record in found]


def steps_told(folder: Path) -> list[int]:
    return [step for (step,) in records(folder, "train", "step")]


def events(folder: Path) -> list[str]:
    """The names of events, without the lost steps that the engine makes up."""
    return [name for (name,) in records(folder, "event", "name") if name != "steps_lost"]


def saved_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / CHECKPOINT_FOLDER).iterdir())


def test_a_run_pauses_evaluates_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of 4, 4 and 2 steps; part of the validation text in the pauses, all texts at the end."""
    monkeypatch.undo()
    engine = CountingEngine()
    assert isinstance(engine, Engine)
    headline, corpus = count(tmp_path, engine), small_corpus()
    assert engine.stretches == [4, 4, 2]
    assert engine.evaluated == [("valid", 50)] * 3 + [("valid", None), ("test", None)]
    assert records(tmp_path, "train", "step", "items", "staleness") == [(n, 10, 2) for n in range(1, 11)]
    evals = records(tmp_path, "eval", "step", "split", "items_seen", "virtual_s")
    assert evals == [(4, "valid", 40, 2.0), (8, "valid", 80, 4.0), (10, "valid", 100, 5.0)]
    # 1 + ... + 4 = 10, ... + 8 = 36, ... + 10 = 55.
    assert [row[0] for row in records(tmp_path, "eval", "perplexity")] == pytest.approx([10, 36, 55])
    assert records(tmp_path, "final_eval", "step", "split", "items_seen") == [(10, "valid", 100), (10, "test", 100)]
    assert records(tmp_path, "calls", "step", "ok", "failed") == [(4, 12, 4), (8, 24, 8), (10, 30, 10)]
    balances = records(tmp_path, "balance", "step", "layer", "histogram", "share_lost")
    assert balances == [(4, "layer0", [2, 2], 0.25), (8, "layer0", [2, 2], 0.25), (10, "layer0", [1, 1], 0.25)]
    assert records(tmp_path, "experts", "step", "load")[-1] == (10, {"layer0.0": 5, "layer0.1": 5})
    assert records(tmp_path, "event", "name", "step") == [("steps_lost", 4), ("steps_lost", 8)]
    exact = {"model": "counting", "steps": 10, "training_tokens": 100, "mean_trunk_staleness": 2.0, "complete": True}
    exact |= {"failed_call_share": 0.25, "load_cv": 0.0, "dead_experts": 0}
    assert {name: headline[name] for name in exact} == exact
    unigram = unigram_perplexity(corpus.train, corpus.valid[1:], VOCAB_SIZE)
    for name, value in {"validation": 55, "test": 55, "unigram": unigram}.items():
        assert headline[f"{name}_perplexity"] == pytest.approx(value)
    assert {"report.md", "config.json"} <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert finished_headline(RunFolder(tmp_path)) == json.loads(json.dumps(headline))


@pytest.mark.parametrize("fails_at", [2, 6, 9])
def test_an_interrupted_run_goes_on_from_its_last_pause(tmp_path: Path, fails_at: int) -> None:
    """Every step and evaluation is in the metrics once, as in a run without a break; the interruption is told, too."""
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        count(broken, CountingEngine(fails_at=fails_at))
    assert "interrupted" in (broken / "report.md").read_text()
    assert finished_headline(RunFolder(broken)) is None
    assert records(broken, "headline", "complete", "steps") == [(False, fails_at)]
    engine = CountingEngine()
    found, expected = count(broken, engine, resume=True), count(whole, CountingEngine())
    assert engine.stretches == [4, 4, 2][fails_at // 4 :]
    fields_of_one = ("step", "split", "loss", "items_seen")
    for kind, fields in (("train", ("step", "items")), ("eval", fields_of_one), ("final_eval", fields_of_one)):
        assert records(broken, kind, *fields) == records(whole, kind, *fields)
    for kind in ("task", "baseline", "calls", "balance", "experts"):
        assert len(records(broken, kind)) == len(records(whole, kind))
    assert events(broken) == ["interrupted", "resumed"]
    same = ("validation_perplexity", "test_perplexity", "steps", "training_tokens", "mean_trunk_staleness", "failures")
    assert {name: found[name] for name in same} == {name: expected[name] for name in same}


def test_a_text_is_evaluated_once_where_the_end_is_over_the_words_of_the_curve(tmp_path: Path) -> None:
    """The last point of the curve is the final figure then, and only the test text is left to read."""
    engine = CountingEngine()
    headline = count(tmp_path, engine, final_eval_items=50)
    assert engine.evaluated == [("valid", 50)] * 3 + [("test", 50)]
    (final, _), last = records(tmp_path, "final_eval", "loss"), records(tmp_path, "eval", "loss")[-1]
    assert final == last == (headline["validation_loss"],)


def test_the_headline_knows_of_the_last_evaluation(tmp_path: Path) -> None:
    """A figure of an engine that changes when it is evaluated is that after the end."""

    class Evaluated(CountingEngine):
        def totals(self) -> Totals:
            return replace(super().totals(), figures={"evaluated_times": len(self.evaluated)})

    assert count(tmp_path, Evaluated(), final_eval_items=50)["evaluated_times"] == 3 + 1


def test_steps_told_in_another_order_are_all_there(tmp_path: Path) -> None:
    """Two trainers of one trunk: whoever made step 8 tells of it before the other tells of step 7."""

    class Crossing(CountingEngine):
        async def advance(self, num_steps: int, on_step: OnStep, on_lost: OnLost) -> None:
            told: list[StepRecord] = []
            await super().advance(num_steps, told.append, on_lost)
            for record in reversed(told):
                on_step(record)

    assert count(tmp_path, Crossing())["steps"] == 10


def test_a_failure_is_reported_and_not_saved(tmp_path: Path) -> None:
    """NaN ends the run with its reason in the report; the last checkpoint is from before it."""
    with pytest.raises(FloatingPointError):
        count(tmp_path, CountingEngine(fails_at=6, error=FloatingPointError("loss nan of step 7")))
    detail = "loss nan of step 7; at step 6; --resume goes on from step 4"
    assert records(tmp_path, "event", "name", "step", "detail")[-1] == ("failed", 6, detail)
    assert saved_steps(tmp_path) == ["4"]


def test_an_interrupt_inside_a_group_is_one(tmp_path: Path) -> None:
    """A simulation's nurseries wrap what is raised inside them."""
    error = BaseExceptionGroup("", [BaseExceptionGroup("", [KeyboardInterrupt()])])
    with pytest.raises(BaseExceptionGroup):
        count(tmp_path, CountingEngine(fails_at=1, error=error))
    assert records(tmp_path, "event", "name") == [("interrupted",)]


def test_a_run_goes_on_under_its_own_settings_only(tmp_path: Path) -> None:
    """The message names the setting, and nothing is touched; so with a folder that is no run, or is to be new."""
    with pytest.raises(KeyboardInterrupt):
        count(tmp_path, CountingEngine(fails_at=5))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"was begun with steps 10 and cannot be resumed with 12"):
        count(tmp_path, CountingEngine(), steps=12, resume=True)
    with pytest.raises(ValueError, match="not empty"):
        count(tmp_path, CountingEngine())
    assert contents(tmp_path) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ValueError, match="not a run that could be resumed"):
        prepare_run(tmp_path / "other", {}, resume=True)
    assert prepare_run(tmp_path / "new", {}, resume=True).begin().path == tmp_path / "new"


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("field", ["steps", "eval_every", "eval_items", "final_eval_items", "checkpoint_every"])
def test_a_plan_names_a_wrong_value(field: str) -> None:
    """The message gives the field and what was got."""
    with pytest.raises(ValueError, match=rf"{field} .*got -1"):
        Plan(**({"steps": 1, "eval_every": 1} | {field: -1}))


async def test_evaluations_and_checkpoints_beside_training(tmp_path: Path, autojump_clock: Any) -> None:
    """One evaluation and one step first, which compile; then training waits for nothing; one more at the end."""
    engine = CountingEngine(step_s=1.0)
    # No checkpoint on the way: it is written in a thread, which the test's clock does not see.
    headline = await count_beside(tmp_path, engine, checkpoint_every=0)
    assert engine.stretches == [1, 9]
    assert engine.evaluated == [("valid", 50)] * 4 + [("valid", None)]
    assert records(tmp_path, "eval", "step", "items_seen") == [(0, 0), (4, 40), (8, 80), (10, 100)]
    assert steps_told(tmp_path) == list(range(1, 11))
    assert records(tmp_path, "calls", "ok", "failed", "failures")[-1] == (30, 10, {"timeout": 10})
    assert (headline["steps"], headline["training_tokens"], headline["failures"]) == (10, 100, {"timeout": 10})
    # As the figure: of the last window, from step 8 to 10, which used both experts alike.
    assert (headline["load_cv"], headline["dead_experts"]) == (0.0, 0)
    assert saved_steps(tmp_path) == ["10"]
    # The load of every expert is a long line: with the evaluations and every ten seconds, not every second.
    assert records(tmp_path, "experts", "step") == [(4,), (8,), (10,)]


async def test_an_evaluation_that_is_left_out_is_told(tmp_path: Path, autojump_clock: Any) -> None:
    """The one of step 4 lasts until step 9."""
    await count_beside(tmp_path, CountingEngine(step_s=1.0, evaluation_s=5.5))
    ((name, step, detail),) = records(tmp_path, "event", "name", "step", "detail")
    assert (name, step) == ("evaluation_left_out", 8)
    assert "step 8: the one before is not done yet" in detail


async def test_the_time_limit_ends_training_with_a_whole_report(tmp_path: Path, autojump_clock: Any) -> None:
    """After five seconds, of which the first step is not one; the last evaluation is still made."""
    headline = await count_beside(tmp_path, CountingEngine(step_s=1.0), max_s=4.5)
    assert (headline["steps"], headline["complete"]) == (5, True)
    assert records(tmp_path, "event", "name", "step") == [("time_limit", 5)]
    assert records(tmp_path, "eval", "step")[-1] == (5,)


async def test_a_run_that_was_cancelled_goes_on_where_it_was(tmp_path: Path, autojump_clock: Any) -> None:
    """Cancelling is Ctrl-C: report and checkpoint. The run that goes on says every step once."""
    with trio.move_on_after(6.5):
        await count_beside(tmp_path, CountingEngine(step_s=1.0))
    assert finished_headline(RunFolder(tmp_path)) is None
    assert "interrupted" in (tmp_path / "report.md").read_text()
    engine = CountingEngine(step_s=1.0)
    headline = await count_beside(tmp_path, engine, resume=True)
    assert (engine.stretches, headline["training_tokens"]) == ([1, 3], 100)
    assert steps_told(tmp_path) == list(range(1, 11))
    assert events(tmp_path) == ["interrupted", "resumed"]


class Killed(BaseException):
    """Nothing is saved any more."""


class Mortal(CountingEngine):
    def totals(self) -> Totals:
        if self.step == 6:
            raise Killed
        return super().totals()


async def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path: Path, autojump_clock: Any) -> None:
    """Records of later steps are cut, whether they stand before or after the checkpoint in the file."""
    with pytest.raises(Killed):
        await count_beside(tmp_path, Mortal(step_s=1.0, fails_at=6, error=Killed()))
    assert not (tmp_path / "report.md").exists()
    await count_beside(tmp_path, CountingEngine(step_s=1.0), resume=True)
    assert steps_told(tmp_path) == list(range(1, 11))


def test_a_checkpoint_of_another_model_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    """The settings are the same, the shapes are not: nothing is written before the checkpoint has been read."""
    count(tmp_path, CountingEngine())
    before, other = contents(tmp_path), CountingEngine()
    other.sum = np.zeros(2)
    with pytest.raises(CheckpointError, match="of another model"):
        count(tmp_path, other, resume=True)
    assert contents(tmp_path) == before


def test_settings_that_may_differ_are_named(tmp_path: Path) -> None:
    """Nested ones by their path; what may not differ is refused with both values."""
    prepare_run(tmp_path, {"expert": {"d_model": 8}, "steps": 4}).begin()
    again = partial(prepare_run, tmp_path, {"expert": {"d_model": 16}, "steps": 6}, resume=True)
    with pytest.raises(ValueError, match=r"begun with expert.d_model 8 and cannot be resumed with 16"):
        again(may_differ=("steps",))
    assert again(may_differ=("steps", "expert.d_model")).changes == ("expert.d_model: 8 -> 16", "steps: 4 -> 6")


def test_a_model_of_anything_reports_its_own_figures(tmp_path: Path) -> None:
    """Samples and accuracies instead of tokens and perplexities."""

    class Classifier(CountingEngine):
        async def evaluate(self, split: str, *, max_items: int | None, on_batch: OnBatch) -> Evaluation:
            return Evaluation(loss=0.5, items=7, metrics={"accuracy": 0.75})

    task, plan = Task(name="digits", unit="samples", main="accuracy"), Plan(steps=4, eval_every=2, pause=True)
    headline = without_waiting(train(Classifier(), prepare_run(tmp_path, {}), plan, task, TrainingProgress(4)))
    expected = {"validation_loss": 0.5, "validation_accuracy": 0.75, "training_samples": 40, "evaluated_samples": 7}
    assert {name: headline[name] for name in expected} == expected
    assert not any("perplexity" in name for name in headline)
    report = (tmp_path / "report.md").read_text()
    assert "| validation accuracy | 0.75 |" in report
    assert "perplexity" not in report.replace("Perplexity, load of the experts", "")


def test_an_engine_that_waits_needs_an_event_loop() -> None:
    """A sentence instead of a hang."""

    async def waits() -> None:
        await trio.lowlevel.cancel_shielded_checkpoint()

    with pytest.raises(RuntimeError, match="await it under trio"):
        without_waiting(waits())


def test_seconds_are_said_of_what_stands_still(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A text that changes, as one that counts seconds itself, gets none; one that has been the same for long does."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = TrainingProgress(3)
    say = progress._say_if_quiet
    with progress.phase("waiting") as change:
        now = 11.0
        say()
        now = 22.0
        change("waiting (22 s)")
        say()
    assert capsys.readouterr().err.splitlines() == ["waiting", "waiting (11 s)", "waiting (22 s)"]


def test_failed_calls_are_named_by_reason() -> None:
    """The most frequent first."""
    assert describe_failures({"late": 4, "timeout": 1200, "busy": 0}) == "1,200 timeout, 4 late"
    assert describe_failures({}) == "none"


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on from there, says so once, and saves what it trains anew where it is found."""
    with pytest.raises(KeyboardInterrupt):
        count(tmp_path, CountingEngine(fails_at=9))
    for path in (tmp_path / CHECKPOINT_FOLDER / "8").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:7])
    engine, again = CountingEngine(fails_at=9), CountingEngine()
    with pytest.raises(KeyboardInterrupt):
        count(tmp_path, engine, resume=True)
    assert "8 cannot be read" in capsys.readouterr().err
    ((_, detail),) = [row for row in records(tmp_path, "event", "name", "detail") if row[0] == "checkpoint_unusable"]
    assert detail.endswith("it is kept as set-aside-8; checkpoint 4 is taken")
    assert count(tmp_path, again, resume=True)["complete"]
    assert (engine.stretches, again.stretches) == ([4, 2], [2])
    assert steps_told(tmp_path) == list(range(1, 11))


has_room_tried = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="room is not tried for there")


def full_from(call: int, patch: pytest.MonkeyPatch, *, until: int = 99) -> None:
    """A disk that has no room from the call with this number on, of those that try for it in a run."""
    calls, real = 0, os.posix_fallocate

    def fallocate(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if call <= calls < until:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    patch.setattr(os, "posix_fallocate", fallocate)


@has_room_tried
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of three cannot be written; the run goes on, ends well, and the report has the reason."""
    full_from(2, monkeypatch, until=3)  # the first call keeps room for the report
    assert count(tmp_path, CountingEngine())["complete"]
    assert capsys.readouterr().err.count("No space left on device; the run goes on") == 1
    assert "checkpoint lost | checkpoint" in (tmp_path / "report.md").read_text()
    assert saved_steps(tmp_path) == ["10", "8"]


@has_room_tried
def test_a_run_whose_end_is_not_saved_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figure and report are there, one sentence says why, and --resume makes the rest again."""
    with monkeypatch.context() as patch:
        full_from(3, patch)
        with pytest.raises(CheckpointError, match=r"10 cannot be written: .*No space left.*--resume goes on"):
            count(tmp_path, CountingEngine())
    assert "end not saved" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "figure.png").exists()
    assert finished_headline(RunFolder(tmp_path)) is None
    assert saved_steps(tmp_path) == ["4"]
    engine = CountingEngine()
    assert count(tmp_path, engine, resume=True)["complete"]
    assert engine.stretches == [4, 2]


@contextmanager
def in_the_way(path: Path) -> Iterator[None]:
    """A folder where a file is: it cannot be written."""
    path.rename(path.with_suffix(".aside"))
    path.mkdir()
    yield
    path.rmdir()
    path.with_suffix(".aside").rename(path)


@pytest.mark.parametrize("pauses", [True, False])
def test_records_that_cannot_be_written_are_counted(pauses: bool, tmp_path: Path, capsys: Any) -> None:
    """The run goes on without them and says so once; figure and report are of what was written."""
    metrics = tmp_path / "metrics.jsonl"
    engine = CountingEngine(around=lambda step: in_the_way(metrics) if step in (5, 6) else nullcontext())
    if pauses:
        count(tmp_path, engine)
    else:
        trio.run(count_beside, tmp_path, engine)
    assert steps_told(tmp_path) == [1, 2, 3, 4, 7, 8, 9, 10]
    assert capsys.readouterr().err.count("metrics.jsonl cannot be written: Is a directory") == 1
    assert "| records lost | 2 records had no room in metrics.jsonl |" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(("name", "other"), [("figure.png", "report.md"), ("report.md", "figure.png")])
def test_what_cannot_be_written_at_the_end_costs_nothing_else(
    name: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a figure there is a report, and without a report a headline; a sentence tells of each."""
    folder = tmp_path / name
    engine = CountingEngine(around=lambda step: folder.mkdir(exist_ok=True) or nullcontext())
    assert count(tmp_path, engine)["complete"]
    assert f"{name} cannot be written: Is a directory" in capsys.readouterr().err
    assert (tmp_path / other).is_file()
    assert records(tmp_path, "headline", "complete") == [(True,)]


def test_a_run_without_matplotlib_has_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Matplotlib is an extra: a sentence says what to install, the rest is there, and `dmoe inspect` is refused."""
    monkeypatch.undo()
    for name in list(sys.modules):
        if name.startswith("matplotlib.") or name == "dmoe_jax.runs.figure":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delattr(dmoe_jax.runs, "figure", raising=False)
    assert count(tmp_path, CountingEngine())["complete"]
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"figure.png is not drawn, since matplotlib\S* is missing: pip install matplotlib", said)
    assert "figure.png" not in (tmp_path / "report.md").read_text()
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path)])
    assert "dmoe inspect draws with Matplotlib, which is missing: pip install matplotlib" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="nobody is kept out there")
def test_two_processes_never_train_in_one_folder(tmp_path: Path) -> None:
    """The second is refused with the first's number, before it has done anything; so is one that begins anew."""

    def come_too(step: int) -> Any:
        for resume in (True, False):
            with pytest.raises(FolderInUse, match=rf"is under way: process {os.getpid()} on .* since "):
                prepare_run(tmp_path, {"steps": 10}, resume=resume)
        return nullcontext()

    def run(engine: CountingEngine) -> None:
        plan, task = Plan(steps=10, eval_every=4, pause=True), language_task(small_corpus())
        without_waiting(train(engine, early, plan, task, TrainingProgress(10)))

    early = prepare_run(tmp_path, {"steps": 10})
    run(CountingEngine(around=come_too))
    with pytest.raises(ValueError, match="not empty"):  # it was prepared before the first one began
        run(CountingEngine())
    assert records(tmp_path, "headline", "complete") == [(True,)]


@dataclass(eq=False)
class Curve(CountingEngine):
    """Its loss at a step is what is written here, and 9 at others."""

    losses: Mapping[int, float] = field(default_factory=dict)

    async def evaluate(self, split: str, *, max_items: int | None, on_batch: OnBatch) -> Evaluation:
        loss = self.losses.get(self.step, 9.0)
        return replace(await super().evaluate(split, max_items=max_items, on_batch=on_batch), loss=loss)


LOSSES = {4: 3.0, 8: 1.0, 12: 2.0, 16: 2.5, 20: 2.0}


def best_of(folder: Path) -> int | None:
    """The best checkpoint of a run, as whoever reads its folder finds it."""
    return best_step(RunFolder(folder).metrics(), numbers_in(folder / CHECKPOINT_FOLDER))


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    """The second of five pauses had the least loss; the two last are kept as ever."""
    count(tmp_path, Curve(losses=LOSSES), steps=20)
    assert numbers_in(tmp_path / CHECKPOINT_FOLDER) == [8, 16, 20]
    assert best_of(tmp_path) == 8


def test_a_resumed_run_goes_on_from_the_newest_and_knows_the_best(tmp_path: Path) -> None:
    """Until there is a better one: then the former best goes as any other."""
    with pytest.raises(KeyboardInterrupt):
        count(tmp_path, Curve(losses=LOSSES, fails_at=18), steps=20)
    assert numbers_in(tmp_path / CHECKPOINT_FOLDER) == [8, 12, 16]
    engine = Curve(losses=LOSSES | {20: 0.5})
    count(tmp_path, engine, steps=20, resume=True)
    assert engine.stretches == [4]
    assert numbers_in(tmp_path / CHECKPOINT_FOLDER) == [16, 20]
    assert best_of(tmp_path) == 20


@pytest.mark.parametrize(("method", "begins_at"), [("save", 4), ("_prune", 8)])
def test_a_run_that_is_killed_at_its_best_knows_it(
    method: str, begins_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the evaluation and its checkpoint, and between the checkpoint and the deletion of others."""
    whole = getattr(Checkpoints, method)

    def killed_at_8(self: Checkpoints, step: int, *args: Any) -> None:
        if step == 8:
            raise Killed
        whole(self, step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, method, killed_at_8)
        with pytest.raises(Killed):
            count(tmp_path, Curve(losses=LOSSES), steps=20)
    engine = Curve(losses=LOSSES)
    count(tmp_path, engine, steps=20, resume=True)
    assert sum(engine.stretches) == 20 - begins_at
    assert numbers_in(tmp_path / CHECKPOINT_FOLDER) == [8, 16, 20]
    assert best_of(tmp_path) == 8


def test_the_best_is_of_the_checkpoints_that_are_there() -> None:
    """Over the same words, of the first split, with a loss that is a number; the first of equal ones."""

    def point(step: Any, loss: Any, *, split: str = "valid", items: int = 50, kind: str = "eval") -> dict[str, Any]:
        return {"kind": kind, "step": step, "loss": loss, "split": split, "items": items}

    good = [point(2, 3.0), point(4, 1.0), point(6, 2.0), point(8, 2.0)]
    assert best_step(good, [2, 4, 6, 8]) == 4
    assert best_step(good, [2, 6, 8]) == 6
    assert best_step(good, [3]) is None
    assert best_step([], [3]) is None
    odd = [point(3, None), point(3, "0"), point(3, math.nan), point([3], 0.1), point(3, 0.1, kind="final_eval")]
    assert best_step([*odd, *good], [2, 3, 6]) == 6
    assert best_step([point(2, 0.5, items=9), point(2, 0.5, split="test"), *good], [2, 6]) == 6
    assert best_step([*good, point(8, 5.0, items=99)], [2, 6, 8]) == 8


def in_virtual_time(monkeypatch: pytest.MonkeyPatch, *, write_s: float) -> None:
    """Have a thread's work done at once after so many seconds of the test's clock, which does not see threads."""

    async def run_sync(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        await trio.sleep(write_s)
        return function(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)


async def test_beside_training_the_best_is_what_was_evaluated(
    tmp_path: Path, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations last for 2.5 steps, and their losses are those of their beginning; so are the checkpoints."""
    in_virtual_time(monkeypatch, write_s=0.1)
    engine = Curve(losses=LOSSES, step_s=1.0, evaluation_s=2.5)
    await count_beside(tmp_path, engine, steps=20, checkpoint_every=100)
    assert numbers_in(tmp_path / CHECKPOINT_FOLDER) == [8, 20]
    assert best_of(tmp_path) == 8
    _, arrays = read_arrays(tmp_path / CHECKPOINT_FOLDER, lambda names: True, 8)
    assert arrays["sum",] == [sum(range(9))]
    assert events(tmp_path) == []


async def test_a_due_checkpoint_and_an_evaluation_share_one(
    tmp_path: Path, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is written once, before its evaluation is done; the best stays though it was one of those."""
    in_virtual_time(monkeypatch, write_s=0.1)
    written: list[int] = []
    save = Checkpoints.save

    def noted(self: Checkpoints, step: int, *args: Any) -> None:
        written.append(step)
        save(self, step, *args)

    monkeypatch.setattr(Checkpoints, "save", noted)
    await count_beside(tmp_path, Curve(losses=LOSSES, step_s=1.0, evaluation_s=2.5), steps=20)
    assert written == [4, 8, 12, 16, 20]
    assert numbers_in(tmp_path / CHECKPOINT_FOLDER) == [8, 16, 20]


async def test_copies_do_not_wait_for_a_slow_disk(
    tmp_path: Path, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is written nothing is copied to be the next best; the best is the best of those that are there."""
    in_virtual_time(monkeypatch, write_s=6.5)
    await count_beside(tmp_path, Curve(losses=LOSSES, step_s=1.0), steps=20, checkpoint_every=100)
    assert numbers_in(tmp_path / CHECKPOINT_FOLDER) == [12, 20]
    assert best_of(tmp_path) == 12


async def test_without_checkpoints_on_the_way_there_is_no_best_one(tmp_path: Path, autojump_clock: Any) -> None:
    """The end is the only one, as asked for."""
    await count_beside(tmp_path, Curve(losses=LOSSES, step_s=1.0), steps=20, checkpoint_every=0)
    assert numbers_in(tmp_path / CHECKPOINT_FOLDER) == [20]
