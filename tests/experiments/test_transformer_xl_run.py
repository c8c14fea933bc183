"""The experiment on this device: bit for bit resumption, the comparison of models, seeds and a search."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dmoe_jax.routing import noisy_top_k
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.training.prepared_run import finished_headline
from dmoe_jax.training.progress import TrainingProgress
from experiments.bench import run_experiment
from experiments.intervals import t_interval
from experiments.transformer_xl import training
from experiments.transformer_xl.presets import PRESETS, Preset
from experiments.transformer_xl.settings import TransformerXLSettings
from experiments.transformer_xl.setup import Setup
from tests.experiments.small_runs import IN_LAYERS, IN_TRUNK, small_corpus, small_preset


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dmoe", "small"])
def test_resumed_training_is_bit_for_bit_the_uninterrupted(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps with a pause after four, dropout everywhere and a noisy router; Ctrl-C in the fifth. Every array of the
    state and every evaluation is the same, and differs from another seed's."""
    preset: Preset = small_preset(model, num_layers=1, layer=IN_LAYERS, **IN_TRUNK)
    plan = training.make_plan(TransformerXLSettings(where="local", steps=6, eval_every=4, eval_tokens=60), preset)
    engines: list[Any] = []
    make_engine = training.make_engine
    monkeypatch.setattr(training, "make_engine", lambda setup: engines.append(make_engine(setup)) or engines[-1])

    def run(name: str, *, seed: int = 0, resume: bool = False) -> list[tuple[Any, ...]]:
        router = noisy_top_k((2, 2)) if preset.config.is_mixture else None
        setup = Setup(preset=preset, corpus=small_corpus(), steps=6, seed=seed, router=router)
        training.train_in_folder(setup, plan, tmp_path / name, router="noisy", resume=resume)
        found = [each for each in RunFolder(tmp_path / name).metrics() if each["kind"] in ("eval", "final_eval")]
        return [tuple(each[field] for field in ("step", "split", "items", "loss")) for each in found]

    def interrupt(progress: TrainingProgress, step: int, *_: Any) -> None:
        if step == 5:
            raise KeyboardInterrupt

    whole = run("whole")
    with monkeypatch.context() as patch:
        patch.setattr(TrainingProgress, "update", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run("broken")
    assert run("broken", resume=True) == whole
    # Points of the curve are over the same 60 words, the final ones over all.
    assert [row[:3] for row in whole] == [(4, "valid", 60), (6, "valid", 60), (6, "valid", 299), (6, "test", 199)]
    first, _, resumed = engines
    jax.tree.map(np.testing.assert_array_equal, first.state(), resumed.state())
    assert (first.totals(), first.facts()) == (resumed.totals(), resumed.facts())
    assert all(a != b for a, b in zip(whole, run("other", seed=1), strict=True))


@pytest.fixture
def small_command(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a run that is over in seconds, by presets and a text that are made small."""
    monkeypatch.setitem(PRESETS, ("small", "tiny"), small_preset("small", num_layers=1))
    monkeypatch.setitem(PRESETS, ("dmoe", "tiny"), small_preset("dmoe", num_layers=1))
    monkeypatch.setattr("experiments.transformer_xl.training.load_corpus", lambda **_: small_corpus())
    return ["--where", "local", "--steps", "4", "--eval-every", "2", "--json"]


@pytest.mark.slow
def test_the_command_compares_its_models(
    small_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One JSON object at the end; a folder for each model; and with --resume nothing is trained again."""
    flags = [*small_command, "--model", "dmoe", "small", "--out", str(tmp_path / "run")]
    run_experiment(TransformerXLSettings, args=flags)
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    ours, theirs = headline["models"]["dmoe"], headline["models"]["small"]
    difference = ours["validation_perplexity"] - theirs["validation_perplexity"]
    assert headline["dmoe_minus_small"] == pytest.approx(difference)
    assert (headline["dmoe_below_small"], headline["dmoe_minus_small_interval"]) == ("not decided", None)  # one seed
    assert (headline["runs"], headline["runs_finished"]) == (2, 2)
    assert ours["training_tokens"] == theirs["training_tokens"] == 4 * 3 * 6
    assert ours["parameters"] > theirs["parameters"]
    assert {"test_perplexity", "mean_trunk_staleness"} <= ours.keys() & theirs.keys()
    dmoe, small = (tmp_path / "run" / model / "seed0" for model in ("dmoe", "small"))
    for folder in (tmp_path / "run", dmoe, small):
        assert {"config.json", "metrics.jsonl", "figure.png", "report.md"} <= {path.name for path in folder.iterdir()}
    assert "at equal FLOPs" in (tmp_path / "run" / "report.md").read_text()
    metrics = (dmoe / "metrics.jsonl").read_bytes()
    run_experiment(TransformerXLSettings, args=[*flags, "--resume"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["models"] == headline["models"]
    assert (dmoe / "metrics.jsonl").read_bytes() == metrics
    with pytest.raises(SystemExit, match="2"):
        run_experiment(TransformerXLSettings, args=[*flags, "--resume", "--seed", "1"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("was begun with seed 0 and cannot be resumed with 1")


@pytest.mark.slow
def test_seeds_and_a_search(small_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command searches and trains two seeds; the next one adds a third."""
    out = tmp_path / "run"
    flags = [*small_command, "--model", "small", "--search", "--out", str(out)]
    run_experiment(TransformerXLSettings, args=[*flags, "--seeds", "2"])
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    searched = {path.name: finished_headline(RunFolder(path)) or {} for path in (out / "search" / "small").iterdir()}
    assert {found["seed"] for found in searched.values()} == {1000}
    best = min(searched, key=lambda name: searched[name]["validation_perplexity"])
    assert headline["step_size_factors"] == {"small": float(best[1:])}
    rate = RunFolder(out / "small" / "seed1").config()["settings"]["recipe"]["learning_rate"]
    assert rate == pytest.approx(1e-2 * float(best[1:]))
    before = {seed: (out / "small" / f"seed{seed}" / "metrics.jsonl").read_bytes() for seed in (0, 1)}
    run_experiment(TransformerXLSettings, args=[*flags, "--seeds", "3", "--resume"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]["small"]
    perplexities = [finished_headline(RunFolder(out / "small" / f"seed{seed}")) for seed in range(3)]
    values = [each["validation_perplexity"] for each in perplexities if each]
    assert found["validation_perplexity"] == pytest.approx(sum(values) / 3)
    assert found["validation_perplexity_interval"] == pytest.approx(t_interval(values).ends)
    assert all((out / "small" / f"seed{seed}" / "metrics.jsonl").read_bytes() == text for seed, text in before.items())
