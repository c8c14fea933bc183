"""The experiment on this device: bit for bit resumption, the comparison of models, and mistakes in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dmoe_jax.routing.noisy_top_k import noisy_top_k
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.training.engine import Engine
from dmoe_jax.training.prepared_run import finished_headline, prepare_run
from dmoe_jax.training.progress import TrainingProgress
from dmoe_jax.training.run import train, train_without_waiting
from dmoe_jax.training.task import language_task
from experiments.intervals import t_interval
from experiments.transformer_xl.__main__ import main
from experiments.transformer_xl.presets import PRESETS, Preset
from experiments.transformer_xl.settings import TransformerXLSettings
from experiments.transformer_xl.setup import Setup
from experiments.transformer_xl.training import make_engine, make_plan, run_settings
from tests.experiments.small_runs import IN_LAYERS, IN_TRUNK, small_corpus, small_preset


def records(folder: Path, kind: str, *fields: str) -> list[tuple[Any, ...]]:
    found = [record for record in RunFolder(folder).metrics() if record["kind"] == kind]
    return [tuple(record.get(field) for field in fields) for record in found]


def real_run(
    folder: Path, preset: Preset, *, seed: int = 0, stop_at: int | None = None, resume: bool = False
) -> tuple[Engine, list[tuple[Any, ...]]]:
    """Six steps on this device with a pause after four; the engine at its end, and the evaluations."""
    router = noisy_top_k((2, 2)) if preset.config.is_mixture else None
    setup = Setup(preset=preset, corpus=small_corpus(), steps=6, seed=seed, router=router)
    plan = make_plan(TransformerXLSettings(where="local", steps=6, eval_every=4, eval_tokens=60), preset)
    run = prepare_run(folder, run_settings(setup, plan, "noisy"), resume=resume)
    engine = make_engine(setup)
    progress = TrainingProgress(6)
    if stop_at is not None:
        progress.update = _interrupt_at(stop_at)  # type: ignore[method-assign]
    task = language_task(setup.corpus, splits=("valid", "test"))
    train_without_waiting(train(engine, run, plan, task, progress))
    evaluations = [records(folder, kind, "step", "split", "loss", "items") for kind in ("eval", "final_eval")]
    return engine, [*evaluations[0], *evaluations[1]]


def _interrupt_at(step: int) -> Callable[..., None]:
    """Ctrl-C at this step."""

    def update(reached: int, *_: Any) -> None:
        if reached == step:
            raise KeyboardInterrupt

    return update


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dmoe", "small"])
def test_resumed_training_is_bit_for_bit_the_uninterrupted(model: Any, tmp_path: Path) -> None:
    """With dropout everywhere and a noisy router: every array of the state, and every evaluation. A run of the same
    seed is the same, one of another seed is not."""
    preset = small_preset(model, num_layers=1, layer=IN_LAYERS, **IN_TRUNK)
    whole, evaluations = real_run(tmp_path / "whole", preset)
    with pytest.raises(KeyboardInterrupt):
        real_run(tmp_path / "broken", preset, stop_at=5)
    resumed, resumed_evaluations = real_run(tmp_path / "broken", preset, resume=True)
    _, other_evaluations = real_run(tmp_path / "other", preset, seed=1)
    assert resumed_evaluations == evaluations
    # Points of the curve are over the same 60 words (60 of each row's 30 were asked for), the final ones over all.
    assert [row[:2] for row in evaluations] == [(4, "valid"), (6, "valid"), (6, "valid"), (6, "test")]
    assert [row[3] for row in evaluations] == [60, 60, 299, 199]
    ours, theirs = (
        dict(_arrays(engine.state())) | {"facts": np.array(json.dumps(engine.facts()))} for engine in (whole, resumed)
    )
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    assert all(a != b for a, b in zip(evaluations, other_evaluations, strict=True))


def _arrays(state: Any) -> list[tuple[str, np.ndarray]]:
    return [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(state)]


@pytest.fixture
def small_command(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a run that is over in seconds, by presets and a text that are made small."""
    monkeypatch.setitem(PRESETS, ("small", "tiny"), small_preset("small", num_layers=1))
    monkeypatch.setitem(PRESETS, ("dmoe", "tiny"), small_preset("dmoe", num_layers=1))
    monkeypatch.setattr("experiments.transformer_xl.training.load_corpus", lambda **_: small_corpus())
    return ["--where", "local", "--steps", "4", "--eval-every", "2", "--no-overhead", "--json"]


@pytest.mark.slow
def test_the_command_compares_its_models(
    small_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One JSON object at the end; a folder for each model; and with --resume nothing is trained again."""
    flags = [*small_command, "--model", "dmoe", "small", "--out", str(tmp_path / "run")]
    main(flags)
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    ours, theirs = headline["models"]["dmoe"], headline["models"]["small"]
    difference = ours["validation_perplexity"] - theirs["validation_perplexity"]
    assert headline["dmoe_minus_small"] == pytest.approx(difference)
    assert (headline["dmoe_beats_small"], headline["dmoe_minus_small_interval"]) == (False, None)  # one seed
    assert (headline["runs"], headline["runs_finished"]) == (2, 2)
    assert ours["training_tokens"] == theirs["training_tokens"] == 4 * 3 * 6
    assert ours["parameters"] > theirs["parameters"]
    wanted = ("test_perplexity", "steps", "tokens_per_s", "mean_trunk_staleness", "failed_call_share")
    assert all(name in figures for name in wanted for figures in (ours, theirs))
    dmoe, small = (tmp_path / "run" / model / "seed0" for model in ("dmoe", "small"))
    for folder in (tmp_path / "run", dmoe, small):
        assert {"config.json", "metrics.jsonl", "figure.png", "report.md"} <= {path.name for path in folder.iterdir()}
    assert "Side by side" in (tmp_path / "run" / "report.md").read_text()
    metrics = (dmoe / "metrics.jsonl").read_text().splitlines()
    main([*flags, "--resume"])
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["models"] == headline["models"]
    after = (dmoe / "metrics.jsonl").read_text().splitlines()
    assert [line for line in after if '"resumed"' not in line] == metrics
    with pytest.raises(SystemExit, match="1"):
        main([*flags, "--resume", "--seed", "1"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("was begun with seed 0 and cannot be resumed with 1")


@pytest.mark.slow
def test_seeds_and_a_search(small_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command searches and trains two seeds; the next one adds a third."""
    out = tmp_path / "run"
    flags = [*small_command, "--model", "small", "--search", "--search-steps", "2", "--out", str(out)]
    main([*flags, "--seeds", "2"])
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    searched = {path.name: finished_headline(RunFolder(path)) for path in (out / "search" / "small").iterdir()}
    assert all(found is not None and found["seed"] == 1000 for found in searched.values())
    best = min(searched, key=lambda name: searched[name]["validation_perplexity"])
    assert headline["step_size_factors"] == {"small": float(best[1:])}
    rate = RunFolder(out / "small" / "seed1").config()["settings"]["recipe"]["learning_rate"]
    assert rate == pytest.approx(1e-2 * float(best[1:]))
    before = {seed: (out / "small" / f"seed{seed}" / "metrics.jsonl").read_bytes() for seed in (0, 1)}
    main([*flags, "--seeds", "3", "--resume"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]["small"]
    perplexities = [finished_headline(RunFolder(out / "small" / f"seed{seed}")) for seed in range(3)]
    values = [each["validation_perplexity"] for each in perplexities if each]
    assert found["validation_perplexity"] == pytest.approx(sum(values) / 3)
    assert found["validation_perplexity_interval"] == pytest.approx(t_interval(values).ends)
    assert all((out / "small" / f"seed{seed}" / "metrics.jsonl").read_bytes() == text for seed, text in before.items())
