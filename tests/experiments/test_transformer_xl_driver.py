"""A run of the driver: pauses where they belong, an end that can be gone on from, and nothing in the metrics twice."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.cli.common import UsageError
from dmoe_jax.cli.progress import TrainingProgress
from dmoe_jax.data.vocabulary import unigram_perplexity
from dmoe_jax.routing.noisy_top_k import noisy_top_k
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.trainer import Evaluation, StepRecord
from experiments.transformer_xl import run
from experiments.transformer_xl.assembly import make_engine, make_plan, run_settings
from experiments.transformer_xl.driver import CHECKPOINT_FOLDER, Plan, train
from experiments.transformer_xl.engine import Engine, Totals
from experiments.transformer_xl.presets import PRESETS, Preset
from experiments.transformer_xl.resuming import cut_metrics, finished_headline, open_run
from tests.experiments.small_runs import DROPOUT, VOCAB_SIZE, small_corpus, small_preset

GRID = {"num_layers": 1, "grid_size": (2,)}


class CountingEngine:
    """Its state is the sum of the steps; its perplexity that sum. Every second step goes to expert layer0.1."""

    name = "counting"

    def __init__(self, *, fails_at: int | None = None, error: BaseException | None = None) -> None:
        self.step = 0
        self.sum = np.zeros(1)
        self.stretches: list[int] = []
        self.evaluated: list[tuple[int, int | None]] = []
        self._fails_at = fails_at
        self._error = error if error is not None else KeyboardInterrupt()

    def advance(self, num_steps: int, on_step: Callable[[StepRecord], None]) -> None:
        self.stretches.append(num_steps)
        for _ in range(num_steps):
            if self.step == self._fails_at:
                raise self._error
            self.step += 1
            self.sum = self.sum + self.step
            on_step(StepRecord(step=self.step, trainer=0, loss=1.0, tokens=10, staleness=2))

    def evaluate(
        self, ids: np.ndarray, *, max_tokens: int | None, on_batch: Callable[[], None] = lambda: None
    ) -> Evaluation:
        self.evaluated.append((ids.size, max_tokens))
        on_batch()
        return Evaluation(loss=math.log(self.sum[0]), targets=ids[1:])

    def state(self) -> Any:
        return {"sum": self.sum}

    def facts(self) -> dict[str, Any]:
        return {"step": self.step}

    def load(self, state: Any, facts: Mapping[str, Any]) -> None:
        self.sum, self.step = np.array(state["sum"]), facts["step"]

    def totals(self) -> Totals:
        odd = (self.step + 1) // 2
        return Totals(
            tokens=10 * self.step,
            staleness=2 * self.step,
            calls_ok=3 * self.step,
            calls_failed=self.step,
            steps_lost=self.step // 4,
            virtual_s=0.5 * self.step,
            load={"layer0.0": odd, "layer0.1": self.step - odd},
        )


def count(folder: Path, engine: CountingEngine, *, steps: int = 10, resume: bool = False) -> dict[str, Any]:
    """A run of the counting engine: pauses after 4 and 8 steps."""
    plan = Plan(steps=steps, eval_every=4, eval_tokens=50, num_layers=1, grid_size=(2,))
    run_folder = open_run(folder, {"steps": steps}, resume=resume)
    return train(engine, run_folder, plan, small_corpus(), TrainingProgress(steps), facts={"model": "counting"})


def records(folder: Path, kind: str, *fields: str) -> list[tuple[Any, ...]]:
    found = [record for record in RunFolder(folder).metrics() if record["kind"] == kind]
    return [tuple(record.get(field) for field in fields) for record in found]


def test_a_run_pauses_evaluates_and_reports(tmp_path: Path) -> None:
    """Stretches of 4, 4 and 2 steps; part of the validation text in the pauses, all texts at the end."""
    engine = CountingEngine()
    assert isinstance(engine, Engine)
    headline = count(tmp_path, engine)
    corpus = small_corpus()
    assert engine.stretches == [4, 4, 2]
    assert engine.evaluated == [(300, 50), (300, 50), (300, None), (200, None)]
    assert records(tmp_path, "train", "step", "tokens", "staleness") == [(n, 10, 2) for n in range(1, 11)]
    evals = records(tmp_path, "eval", "step", "split", "perplexity", "tokens_seen", "virtual_s")
    # 1 + ... + 4 = 10, ... + 8 = 36, ... + 10 = 55.
    expected = [(4, "valid", 10, 40, 2.0), (8, "valid", 36, 80, 4.0), (10, "valid", 55, 100, 5.0)]
    assert [(*row[:2], round(row[2], 6), *row[3:]) for row in evals] == [*expected, (10, "test", 55, 100, 5.0)]
    assert records(tmp_path, "calls", "step", "ok", "failed") == [(4, 12, 4), (8, 24, 8), (10, 30, 10)]
    balances = records(tmp_path, "balance", "step", "layer", "histogram", "share_lost")
    assert balances == [(4, "layer0", [2, 2], 0.25), (8, "layer0", [2, 2], 0.25), (10, "layer0", [1, 1], 0.25)]
    assert records(tmp_path, "experts", "step", "load")[-1] == (10, {"layer0.0": 5, "layer0.1": 5})
    assert records(tmp_path, "event", "name", "step") == [("steps_lost", 4), ("steps_lost", 8)]
    assert headline["model"] == "counting"
    assert headline["validation_perplexity"] == pytest.approx(55)
    assert headline["test_perplexity"] == pytest.approx(55)
    unigram = unigram_perplexity(corpus.train, corpus.valid[1:], VOCAB_SIZE)
    assert headline["unigram_perplexity"] == pytest.approx(unigram)
    assert (headline["steps"], headline["tokens"], headline["staleness"]) == (10, 100, 2.0)
    assert (headline["failed_call_share"], headline["load_cv"], headline["dead_experts"]) == (0.25, 0.0, 0)
    assert headline["complete"] is True
    assert {"report.md", "figure.png", "config.json"} <= {path.name for path in tmp_path.iterdir()}
    assert finished_headline(RunFolder(tmp_path)) == json.loads(json.dumps(headline))


@pytest.mark.parametrize("fails_at", [2, 6, 9])
def test_an_interrupted_run_goes_on_from_its_last_pause(tmp_path: Path, fails_at: int) -> None:
    """Every step and evaluation is in the metrics once, as in a run without a break; the interruption is told, too."""
    with pytest.raises(KeyboardInterrupt):
        count(tmp_path / "broken", CountingEngine(fails_at=fails_at))
    report = (tmp_path / "broken" / "report.md").read_text()
    assert "interrupted" in report
    assert finished_headline(RunFolder(tmp_path / "broken")) is None
    assert records(tmp_path / "broken", "headline", "complete", "steps") == [(False, fails_at)]
    engine = CountingEngine()
    broken = count(tmp_path / "broken", engine, resume=True)
    whole = count(tmp_path / "whole", CountingEngine())
    assert engine.stretches == [4, 4, 2][fails_at // 4 :]
    for kind, fields in (("train", ("step", "tokens")), ("eval", ("step", "split", "loss", "tokens_seen"))):
        assert records(tmp_path / "broken", kind, *fields) == records(tmp_path / "whole", kind, *fields)
    for kind in ("baseline", "calls", "balance", "experts"):
        assert len(records(tmp_path / "broken", kind)) == len(records(tmp_path / "whole", kind))
    events = [name for (name,) in records(tmp_path / "broken", "event", "name") if name != "steps_lost"]
    assert events == ["interrupted", "resumed"]
    same = ("validation_perplexity", "test_perplexity", "steps", "tokens", "staleness", "calls_ok", "steps_lost")
    assert {name: broken[name] for name in same} == {name: whole[name] for name in same}


def test_a_failure_is_reported_and_not_saved(tmp_path: Path) -> None:
    """NaN ends the run with its reason in the report; the last checkpoint is from before it."""
    with pytest.raises(FloatingPointError):
        count(tmp_path, CountingEngine(fails_at=6, error=FloatingPointError("loss nan of step 7")))
    ((name, step, detail),) = [
        row for row in records(tmp_path, "event", "name", "step", "detail") if row[0] != "steps_lost"
    ]
    assert (name, step) == ("failed", 6)
    assert detail == "loss nan of step 7; at step 6; --resume goes on from step 4"
    checkpoints = Checkpoints(tmp_path / CHECKPOINT_FOLDER)
    assert checkpoints.latest_step() == 4
    checkpoints.close()


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
    before = (tmp_path / "metrics.jsonl").read_bytes(), (tmp_path / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"was begun with steps 10 and cannot be resumed with 12"):
        count(tmp_path, CountingEngine(), steps=12, resume=True)
    with pytest.raises(ValueError, match="not empty"):
        count(tmp_path, CountingEngine())
    assert before == ((tmp_path / "metrics.jsonl").read_bytes(), (tmp_path / "config.json").read_bytes())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ValueError, match="not a run that could be resumed"):
        open_run(tmp_path / "other", {}, resume=True)
    assert open_run(tmp_path / "new", {}, resume=True).path == tmp_path / "new"


def test_a_line_that_a_killed_process_left_unfinished_is_cut(tmp_path: Path) -> None:
    """Records after the checkpoint go, but for the run's own ends, and the file ends with a whole line."""
    folder = open_run(tmp_path, {}, resume=False)
    folder.log("train", step=1)
    size = folder.metrics_path.stat().st_size
    folder.log("train", step=2)
    folder.log("event", name="steps_lost")
    folder.log("event", name="interrupted")
    with folder.metrics_path.open("ab") as file:
        file.write(b'{"kind":"tra')
    folder = open_run(tmp_path, {}, resume=True)
    cut_metrics(folder, size)
    assert records(tmp_path, "train", "step") == [(1,)]
    assert records(tmp_path, "event", "name") == [("interrupted",), ("resumed",)]


def real_run(
    folder: Path, preset: Preset, *, seed: int = 0, stop_at: int | None = None, resume: bool = False
) -> tuple[Engine, list[tuple[Any, ...]]]:
    """Six steps on this device with a pause after four; the engine at its end, and the evaluations."""
    corpus, router = small_corpus(), noisy_top_k((2, 2))
    plan = make_plan(preset, steps=6, eval_every=4, eval_tokens=60)
    settings = run_settings(preset, corpus, plan, where="local", seed=seed, router="noisy")
    engine = make_engine(preset, corpus, where="local", steps=6, seed=seed, router=router)
    progress = TrainingProgress(6)
    if stop_at is not None:
        progress.update = _interrupt_at(stop_at)  # type: ignore[method-assign]
    train(engine, open_run(folder, settings, resume=resume), plan, corpus, progress)
    return engine, records(folder, "eval", "step", "split", "loss", "perplexity")


def _interrupt_at(step: int) -> Callable[..., None]:
    """Ctrl-C at this step."""

    def update(reached: int, *_: Any) -> None:
        if reached == step:
            raise KeyboardInterrupt

    return update


@pytest.mark.parametrize("model", ["dmoe", "small"])
def test_resumed_training_is_bit_for_bit_the_uninterrupted(model: Any, tmp_path: Path) -> None:
    """With dropout everywhere and a noisy router: every array of the state, and every evaluation. A run of the same
    seed is the same, one of another seed is not."""
    preset = small_preset(model, num_layers=1, **DROPOUT)
    whole, evaluations = real_run(tmp_path / "whole", preset)
    with pytest.raises(KeyboardInterrupt):
        real_run(tmp_path / "broken", preset, stop_at=5)
    resumed, resumed_evaluations = real_run(tmp_path / "broken", preset, resume=True)
    _, other_evaluations = real_run(tmp_path / "other", preset, seed=1)
    assert resumed_evaluations == evaluations
    assert [row[:2] for row in evaluations] == [(4, "valid"), (6, "valid"), (6, "test")]
    ours, theirs = (
        dict(_arrays(engine.state())) | {"facts": np.array(json.dumps(engine.facts()))} for engine in (whole, resumed)
    )
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    assert all(a != b for a, b in zip(evaluations, other_evaluations, strict=True))


def _arrays(state: Any) -> list[tuple[str, np.ndarray]]:
    import jax

    return [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(state)]


@pytest.fixture
def small_command(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a run that is over in seconds, by presets and a text that are made small."""
    monkeypatch.setitem(PRESETS, ("small", "tiny"), small_preset("small", num_layers=1))
    monkeypatch.setitem(PRESETS, ("dmoe", "tiny"), small_preset("dmoe", num_layers=1))
    monkeypatch.setattr("dmoe_jax.data.corpora.load_corpus", lambda **_: small_corpus())
    return ["--where", "local", "--steps", "4", "--eval-every", "2", "--no-overhead", "--json"]


def test_the_command_compares_its_models(
    small_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One JSON object at the end; a folder for each model; and with --resume nothing is trained again."""
    flags = [*small_command, "--model", "dmoe", "small", "--out", str(tmp_path / "run")]
    run.main(flags)
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    ours, theirs = headline["models"]["dmoe"], headline["models"]["small"]
    assert headline["dmoe_below_small"] is (ours["validation_perplexity"] < theirs["validation_perplexity"])
    assert ours["tokens"] == theirs["tokens"] == 4 * 3 * 6
    assert ours["parameters"] > theirs["parameters"]
    wanted = ("test_perplexity", "steps", "tokens_per_s", "staleness", "failed_call_share")
    assert all(name in figures for name in wanted for figures in (ours, theirs))
    for folder in (tmp_path / "run", tmp_path / "run" / "dmoe", tmp_path / "run" / "small"):
        assert {"config.json", "metrics.jsonl", "figure.png", "report.md"} <= {path.name for path in folder.iterdir()}
    assert "Side by side" in (tmp_path / "run" / "report.md").read_text()
    metrics = (tmp_path / "run" / "dmoe" / "metrics.jsonl").read_text().splitlines()
    run.main([*flags, "--resume"])
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["models"] == headline["models"]
    after = (tmp_path / "run" / "dmoe" / "metrics.jsonl").read_text().splitlines()
    assert [line for line in after if '"resumed"' not in line] == metrics
    with pytest.raises(SystemExit, match="1"):
        run.main([*flags, "--resume", "--seed", "1"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("was begun with seed 0 and cannot be resumed with 1")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "transformer_xl: interrupted; --resume goes on"),
        (BaseExceptionGroup("", [KeyboardInterrupt()]), 130, "transformer_xl: interrupted; --resume goes on"),
        (UsageError("no such corpus"), 1, "transformer_xl: error: no such corpus"),
        (FloatingPointError("loss nan of step 3"), 1, "transformer_xl: error: loss nan of step 3"),
        (ExceptionGroup("", [FloatingPointError("nan")]), 1, "transformer_xl: error: nan"),
    ],
)
def test_a_run_that_ends_early_says_why_in_one_line(
    error: BaseException,
    status: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Status 130 after Ctrl-C, 1 otherwise; no traceback."""

    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(run, "run_models", fail)
    monkeypatch.setattr(run, "set_up_jax", lambda: None)
    with pytest.raises(SystemExit) as exit_:
        run.main([])
    assert exit_.value.code == status
    assert capsys.readouterr().err == f"{line}\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is expected becomes a line."""

    def fail(_: object) -> None:
        raise ExceptionGroup("", [FloatingPointError("nan"), KeyError("bug")])

    monkeypatch.setattr(run, "run_models", fail)
    monkeypatch.setattr(run, "set_up_jax", lambda: None)
    with pytest.raises(ExceptionGroup):
        run.main([])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--model", "small", "small"], "--model names a model twice"),
        (["--resume"], "--resume needs --out"),
        (["--failure-rate", "1"], "--failure-rate from 0 to below 1"),
        (["--router", "nonesuch", "--out", "OUT"], "nonesuch"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(
    flags: list[str],
    message: str,
    small_command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is computed."""
    with pytest.raises(SystemExit) as exit_:
        run.main([*small_command, *(flag.replace("OUT", str(tmp_path / "run")) for flag in flags)])
    assert exit_.value.code in (1, 2)
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("field", ["steps", "eval_every", "eval_tokens", "final_eval_tokens"])
def test_a_plan_names_a_wrong_value(field: str) -> None:
    """The message gives the field and what was got."""
    with pytest.raises(ValueError, match=rf"{field} .*got -1"):
        Plan(**({"steps": 1, "eval_every": 1} | {field: -1}))
