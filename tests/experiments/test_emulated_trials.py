"""The experiments that run in the emulator: what is trained, what is made of it, and a small run of each."""

import dataclasses
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from dmoe_jax.emulator import Data, draw_order, exponential_delays
from dmoe_jax.emulator.order import BACKWARD, FORWARD, STAGE, EventOrder
from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run
from experiments.emulation import measurement as emulation
from experiments.emulation.__main__ import main as emulation_main
from experiments.emulation.dense_emulator import DenseEmulator, draw_turns
from experiments.emulation.released_gate import released_gate
from experiments.emulation.settings import EmulationSettings
from experiments.emulation.trials import Trial, next_of, with_fresh_experts
from experiments.mnist_convergence import measurement as convergence
from experiments.mnist_convergence.__main__ import main as convergence_main
from experiments.mnist_convergence.curves import _WIDTHS, AUTHORS, FRESH, NETWORKS, label_of
from experiments.mnist_convergence.curves import all_trials as all_curves
from experiments.mnist_convergence.settings import MnistSettings
from experiments.staleness import measurement as staleness
from experiments.staleness.__main__ import main as staleness_main
from experiments.staleness.rows import DEFAULT, MANY_ONE, ONE, ONE_DEFAULT, PLAIN, all_trials
from experiments.staleness.settings import StalenessSettings

needs_mnist = pytest.mark.skipif(not os.environ.get("DMOE_DATA"), reason="MNIST is not at hand: DMOE_DATA is not set")


def run_of(settings: Any, path: Path, records: list[dict[str, Any]]) -> Run[Any]:
    folder = RunFolder.create(path, settings, name="test")
    for record in records:
        folder.log("trial", **record)
    return Run(settings=settings, folder=folder, console=Console(quiet=True))


def test_fresh_experts_are_those_of_the_end_of_a_step() -> None:
    """Each step reads where it read; all the rest of it happens at its end, in the order in which it was."""
    order = draw_order(
        num_updates=40, num_trainers=5, num_layers=2, num_pairs=3, delay=exponential_delays(1.0), failure_rate=0.1
    )
    fresh = with_fresh_experts(order)
    last = STAGE + 4
    for trainer in range(5):
        kinds, own = order.kind[order.trainer == trainer], fresh.kind[fresh.trainer == trainer]
        assert own.tolist() == kinds[: len(own)].tolist()
    reads = [updates_before(each, STAGE) for each in (order, fresh)]
    assert reads[1] == reads[0][: len(reads[1])]
    assert len(fresh.updates) == 40
    for end in fresh.updates:
        # Between the read and the end of a step lie other steps; the 15 events before its end are its own.
        assert set(fresh.trainer[end - 15 : end + 1].tolist()) == {int(fresh.trainer[end])}
        assert set(fresh.kind[end - 15 : end].tolist()) == {FORWARD, BACKWARD, *range(STAGE + 1, last)}


def updates_before(order: EventOrder, kind: int) -> list[tuple[int, int]]:
    """(trainer, updates of the trunk before it) of each event of a kind that belongs to a finished step."""
    done = np.cumsum(order.kind == STAGE + 4)
    return [(int(order.trainer[place]), int(done[place])) for place in np.flatnonzero(order.kind == kind)]


def test_dense_trainers_apply_what_they_read() -> None:
    """By hand: three trainers, a quadratic, plain SGD scaled by staleness; a step that is not finite is not made."""
    turns = np.array([0, 1, 0, 2, 1, 0], np.int32)
    batches = np.arange(12, dtype=np.float32).reshape(3, 4)
    batches[2, 0] = np.inf
    emulator = DenseEmulator(
        lambda params, batch, keys: (params - batch) ** 2,
        optimizer=optax.chain(optax.sgd(0.1), scale_by_told()),
        num_trainers=3,
    )
    state = emulator.init(jnp.float32(1.0), num_updates=6)
    state = emulator.run(state, turns[:2], Data(batches))
    state = emulator.run(state, turns[2:], Data(batches))

    params, read, read_at, row, losses = 1.0, [1.0] * 3, [0] * 3, [0] * 3, []
    for step, trainer in enumerate(turns):
        target = float(batches[trainer, row[trainer]])
        loss = (read[trainer] - target) ** 2
        if np.isfinite(loss):
            params -= 0.1 * 2 * (read[trainer] - target) / (1 + step - read_at[trainer])
        losses.append(loss if np.isfinite(loss) else np.nan)
        read[trainer], read_at[trainer] = params, step + 1
        row[trainer] += 1
    np.testing.assert_allclose(state.losses, losses, rtol=1e-5)
    assert float(state.params) == pytest.approx(params, rel=1e-5)
    with pytest.raises(ValueError, match="expected at least 5 batches for each trainer, one a step, got 4"):
        emulator.run(state, np.zeros(2, np.int32), Data(batches))


def scale_by_told() -> optax.GradientTransformationExtraArgs:
    def update(updates: Any, state: Any, params: Any = None, *, staleness: Any, **extra: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf / (1 + staleness), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def test_turns_are_as_many_for_everybody() -> None:
    turns = draw_turns(num_updates=4000, num_trainers=8, delay=exponential_delays(1.0), seed=1)
    assert np.bincount(turns).min() > 420
    assert (
        turns.tolist() == draw_turns(num_updates=4000, num_trainers=8, delay=exponential_delays(9.0), seed=1).tolist()
    )


def test_the_released_gate_is_flat_frozen_and_normalised() -> None:
    router = released_gate((4, 4))
    keys = router.init(jax.random.key(0), 8)
    np.testing.assert_allclose(np.linalg.norm(jax.tree.leaves(keys)[0], axis=-1), 1, rtol=1e-5)
    x = jax.random.normal(jax.random.key(1), (3, 8)) * 5 + 2

    def total(keys: Any) -> Any:
        return jnp.sum(router.scores(keys, x).logits[0] ** 2)

    assert total(keys) > 0
    np.testing.assert_array_equal(jax.tree.leaves(jax.grad(total)(keys))[0], 0)
    indices, mask = router.select(router.scores(keys, x), 4)
    assert indices.shape == (3, 4, 2)
    assert mask.all()


def test_rows_of_the_staleness_table() -> None:
    rows = all_trials(StalenessSettings(seeds=2, seed=3))
    assert {trial.seed for trial in rows} == {3, 4}
    mnist = [trial for trial in rows if trial.problem == "mnist" and trial.seed == 3]
    assert [trial.label for trial in mnist][:5] == [ONE, ONE_DEFAULT, "stale trunk", PLAIN, DEFAULT]
    assert len({trial.label for trial in mnist}) == len(mnist)
    plain = next(trial for trial in mnist if trial.label == PLAIN)
    assert plain.num_trainers == 64
    assert next(trial for trial in mnist if trial.label == "256 trainers").num_updates == 2 * plain.num_updates
    assert {trial.problem for trial in all_trials(StalenessSettings(quick=True))} == {"mnist"}
    quick = [all_trials(StalenessSettings(problem=problem, quick=True))[0] for problem in ("mnist", "transformer-xl")]
    assert [trial.num_updates for trial in quick] == [1024, 256]
    language = all_trials(StalenessSettings(problem="transformer-xl", seeds=1, only=("256",)))
    steps = [(trial.label.removeprefix("256 trainers"), trial.remedy.get("step_size", 1.0)) for trial in language]
    assert steps == [("", 1), (", default", 1), (", step sizes times 4", 4), (", default, step sizes times 4", 4)]
    assert [trial.in_swarm for trial in all_trials(StalenessSettings(swarm=True, seeds=1))].count(True) == 2
    chosen = all_trials(StalenessSettings(problem="mnist", seeds=1, only=("256", "as many")))
    assert [trial.label for trial in chosen] == ["256 trainers", "256 trainers, default", MANY_ONE]
    exact = all_trials(StalenessSettings(problem="mnist", seeds=1, only=("one trainer",)))
    assert [trial.label for trial in exact] == [ONE]
    with pytest.raises(
        ValueError, match=r"--only: no row has '512' in its name; there are one trainer; .*256 trainers"
    ):
        all_trials(StalenessSettings(only=("256", "512")))
    # JSON carries a trial, and seeds of a row share their compiled program.
    assert Trial(**json.loads(json.dumps(dataclasses.asdict(plain)))).setting() == plain.setting()


def test_what_a_row_loses(tmp_path: Path) -> None:
    """Over what plain asynchrony loses, seed by seed; a seed that a row lacks does not count."""

    def record(label: str, seed: int, loss: float) -> dict[str, Any]:
        return {
            **({"expert_staleness": 2.0 + seed} if label == DEFAULT else {}),
            "problem": "mnist",
            "label": label,
            "seed": seed,
            "points": [{"step": 8, "loss": loss, "accuracy": 0.5}],
        }

    records = [record(ONE, 0, 0.4), record(ONE, 1, 0.5), record(ONE_DEFAULT, 0, 0.4), record(ONE_DEFAULT, 1, 0.5)]
    records += [record(PLAIN, 0, 1.0), record(PLAIN, 1, 1.1), record(DEFAULT, 0, 0.7), record(DEFAULT, 1, 0.68)]
    records += [record(DEFAULT, 2, 9.0), record(MANY_ONE, 0, 0.3)]
    records += [record("256 trainers", 0, 1.3), record("256 trainers, default", 0, 0.5)]
    run = run_of(StalenessSettings(), tmp_path / "run", records)
    values = staleness.last_losses(run)
    np.testing.assert_allclose(staleness.lost_shares(values, "mnist", DEFAULT), [0.5, 0.3])
    result = staleness.summarise(run)
    assert result is not None
    assert result.figures["mnist_default_lost_share"] == pytest.approx(0.4)
    assert result.figures["mnist_one_trainer_difference"] == 0
    assert result.figures["mnist_many_lost_share"] == pytest.approx(0.2)
    lost, more, stale = ({row[0]: row[column] for row in result.tables[0].rows} for column in (-1, -2, -3))
    assert (stale[DEFAULT], stale[ONE]) == (3.0, "")
    assert (more[ONE], more[DEFAULT], more["256 trainers"]) == ("", "+0.240 (-0.522 to +1.002)", "+1.000")
    assert (lost[DEFAULT], lost["256 trainers, default"], lost["256 trainers"]) == ("0.40", "0.20", "1.00")
    assert result.missed_bars == []
    assert len(staleness.draw(run, result).axes) == 1
    assert staleness.summarise(run_of(StalenessSettings(), tmp_path / "empty", [])) is None


def test_margins_and_costs(tmp_path: Path) -> None:
    """The margin is what is left after both standard deviations, at the worst point; the cost is of the last point."""
    slow, failing = label_of(256, NETWORKS[1]), label_of(256, NETWORKS[2])
    dense = label_of(None, NETWORKS[1])
    fresh = label_of(256, NETWORKS[1], FRESH)
    found = {
        fresh: [[0.9, 0.9], [0.9, 0.9]],
        slow: [[0.5, 0.9], [0.7, 0.9]],
        dense: [[0.1, 0.8], [0.3, 0.8]],
        failing: [[0.5, 0.86], [0.5, 0.93]],
    }
    records = [
        {"label": label, "seed": seed, "points": [{"step": 1024 * (i + 1), "accuracy": a} for i, a in enumerate(curve)]}
        for label, curves in found.items()
        for seed, curve in enumerate(curves)
    ]
    result = convergence.summarise(run := run_of(MnistSettings(), tmp_path / "run", records))
    assert result is not None
    assert result.figures["least_margin"] == pytest.approx(min(0.4 - 2 * 0.1 * 2**0.5, 0.1))
    assert result.figures["least_margin_fresh_experts"] == pytest.approx(0.1)
    assert result.figures["failures_cost"] == pytest.approx(0.9 - 0.895)
    assert result.figures["failures_cost_error"] == pytest.approx(0.035)  # 0.86 and 0.93; without failures always 0.9
    assert result.missed_bars == []
    theirs = {row[0]: row for row in result.tables[1].rows if row[1] == 1024}
    assert theirs[dense][2] == pytest.approx(0.2)
    assert len(convergence.draw(run, result).axes) == 3


def test_the_bars_are_of_the_authors_program_where_it_was_run(tmp_path: Path) -> None:
    """Theirs is the figure of the paper. Single seeds have no error."""
    accuracies = {("", 1): 0.5, ("", 2): 0.4, (AUTHORS, 1): 0.7, (AUTHORS, 2): 0.695}
    records = [
        {"label": label_of(256, NETWORKS[place], variant), "seed": 0, "points": [{"step": 300, "accuracy": value}]}
        for (variant, place), value in accuracies.items()
    ]
    records.append({"label": label_of(None, NETWORKS[1]), "seed": 0, "points": [{"step": 300, "accuracy": 0.45}]})
    result = convergence.summarise(run_of(MnistSettings(), tmp_path / "run", records))
    assert result is not None
    assert [bar.name for bar in result.bars] == [
        "least_margin_frozen_gate_fresh_experts",
        "failures_cost_frozen_gate_fresh_experts",
    ]
    assert result.missed_bars == []
    assert result.figures["failures_cost"] == pytest.approx(0.1)
    assert math.isnan(result.figures["failures_cost_error"])
    plain = [record for record in records if AUTHORS not in record["label"]]
    result = convergence.summarise(run_of(MnistSettings(), tmp_path / "plain", plain))
    assert result is not None
    assert result.missed_bars == ["failures_cost"]


def test_a_process_goes_on_with_what_it_has_compiled() -> None:
    """No setting is compiled twice as long as there are others; then idle processes help out."""
    curves = all_curves(MnistSettings(seeds=3, experts=(64, 256)))
    waiting = list(curves)
    last: dict[int, Trial] = {}
    took: dict[int, list[Trial]] = {0: [], 1: []}
    while waiting:
        for process in (0, 1):
            if waiting:
                last[process] = waiting.pop(next_of(waiting, last.get(process), last.values()))
                took[process].append(last[process])
    assert sum(map(len, took.values())) == len(curves)
    settings = {trial.setting() for trial in curves}
    assert len(settings) == 1 + 2 * 2  # dense; mixtures by their experts and gates, whatever the network
    groups = [
        [trial.seed for trial in group]
        for own in took.values()
        for _, group in itertools.groupby(own, key=Trial.setting)
    ]
    assert len(groups) <= len(settings) + 1  # only the last setting may have been shared
    assert all(seeds == sorted(seeds) for seeds in groups)  # experts of one seed are the same in every network


def test_curves_of_the_figure() -> None:
    labels = [trial.label for trial in all_curves(MnistSettings(seeds=1))]
    assert labels == [label_of(None, network) for network in NETWORKS[:2]] + [
        label_of(count, network, variant)
        for count, variant, network in itertools.product((64, 256, 4096), ("", AUTHORS), NETWORKS)
    ]
    extras = [trial.label for trial in all_curves(MnistSettings(seeds=1, extras=True))]
    assert extras[: len(labels)] == labels
    assert len(set(extras)) == len(extras) == len(labels) + 1 + 2 + 2
    assert {trial.gate for trial in all_curves(MnistSettings(gate="frozen")) if trial.problem == "mnist"} == {"frozen"}
    paper = {trial.label: trial for trial in all_curves(MnistSettings(size="paper", seeds=1, experts=(256, 4096)))}
    wide = paper[label_of(4096, NETWORKS[2], AUTHORS)]
    assert wide.sizes["d_model"] == 512
    assert wide.sizes["batch_size"] == 8
    assert wide.fresh_experts
    assert (wide.num_trainers, wide.num_updates, wide.failure_rate) == (64, 20_480, 0.1)


@pytest.mark.parametrize(
    ("main", "flags", "message"),
    [
        (convergence_main, ["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (convergence_main, ["--quick", "--extras"], "--extras has no quick run: leave out --quick"),
        (convergence_main, ["--updates", "50"], "--updates must be at least 100, got 50"),
        (staleness_main, ["--trainers", "1"], "--trainers must be at least 2, got 1"),
        (emulation_main, ["--rounds", "0"], "--rounds must be at least 1, got 0"),
    ],
)
def test_wrong_flags(main: Any, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert message in " ".join(capsys.readouterr().err.split())


def test_emulation_takes_the_greatest_difference(tmp_path: Path) -> None:
    run = run_of(EmulationSettings(), tmp_path / "run", [])
    assert emulation.summarise(run) is None
    for problem, dtype, losses, trunk, last_bit in (
        ("MNIST", "float64", 1e-7, 2e-12, 1e-12),
        ("MNIST", "float64", 2e-7, 1e-12, 1e-12),
        ("MNIST", "float32", 1e-7, 3e-5, 4e-5),
        ("Transformer-XL", "float32", 1e-6, 2e-6, 2e-6),
    ):
        own = {"losses": losses, "trunk": trunk, "experts": 3e-13, "last_bit": last_bit}
        run.log("difference", problem=problem, dtype=dtype, **own)
        interrupted = emulation.summarise(run)
        assert interrupted is not None
        assert interrupted.figures["float64_parameter_difference"] == 2e-12
    for ratio in (14.0, 16.0, 30.0):
        run.log("speed", problem="MNIST", ratio=ratio, emulator=100.0)
    result = emulation.summarise(run)
    assert result is not None
    assert result.figures["emulator_max_difference"] == result.figures["max_difference_mnist"] == 3e-5
    assert result.figures["last_bit_difference_mnist"] == 4e-5
    assert result.figures["max_difference_transformer_xl"] == 2e-6
    assert result.figures["emulator_speedup"] == 16
    assert result.missed_bars == ["emulator_max_difference", "emulator_over_one_jit"]


@needs_mnist
@pytest.mark.slow
@pytest.mark.parametrize("main", [convergence_main, staleness_main])
@pytest.mark.timeout(400)
def test_a_small_run(main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To its report, and again: what is finished is not trained twice."""
    monkeypatch.setitem(_WIDTHS, "laptop", 8)
    flags = ["--quick", "--json", "--out", str(tmp_path / "run"), "--seeds", "1", "--jobs", "1"]
    flags += ["--updates", "100"] if main is convergence_main else ["--updates", "20", "--trainers", "3"]
    first = main(flags)
    records = (tmp_path / "run" / "metrics.jsonl").read_text().count('"trial"')
    assert records == 4
    assert main([*flags, "--resume"]) is first is None
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"trial"') == records
    assert (tmp_path / "run" / "figure.png").stat().st_size > 10_000
    assert "| " in (tmp_path / "run" / "report.md").read_text()
