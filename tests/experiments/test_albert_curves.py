"""The part `albert` of the experiment on one large batch: a tiny model, few peers, one of which dies."""

import math
from pathlib import Path

import pytest
from rich.console import Console

from dmoe_jax.data.corpora import load_corpus
from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run
from experiments.collaborative.albert_baselines import all_reduce_step_s, curve_with, parameter_server_step_s
from experiments.collaborative.albert_part import albert_figures, log_curve
from experiments.collaborative.albert_swarm import FASTEST_PER_S, Curve, Together, machines, train_together
from experiments.collaborative.albert_task import AlbertTask, TaskSize, albert_task
from experiments.collaborative.measurement import EXPERIMENT
from experiments.collaborative.settings import CollaborativeSettings
from experiments.collaborative.world import compare_with_one_machine

TINY = TaskSize(
    num_words=200,
    seq_len=16,
    d_model=8,
    num_layers=1,
    target=48,
    held_out=16,
    warmup_steps=1,
    total_steps=20,
    sent=20_000,
)
STEPS = 5


@pytest.fixture(scope="module")
def task() -> AlbertTask:
    return albert_task(TINY, corpus=load_corpus(source="embedded"))


def play(task: AlbertTask) -> Together:
    """Four machines; somebody dies every 20 s on average, where a step takes about 5 s."""
    # Lines of a larger model: on those of one so small, reports alone would take long.
    specs = machines(4, num_params=50_000)
    return train_together(task, specs, steps=STEPS, mean_life_s=80.0, keep=True)


@pytest.fixture(scope="module")
def played(task: AlbertTask) -> Together:
    return play(task)


@pytest.mark.slow
def test_the_loss_is_that_of_one_machine_with_the_same_samples(task: AlbertTask, played: Together) -> None:
    """Peers' parameters are one process's after every step, though peers died; and so is the loss."""
    assert played.failed_at
    assert played.curve.last.step == STEPS
    # The play ends when the first peer has made the last step: of that one not all members are known.
    found = compare_with_one_machine(played.problem, played.lives, STEPS - 1)
    assert found.unexplained == ()
    assert found.difference <= 1e-5
    assert played.chains_apart == 0
    params = [life.params[STEPS - 1] for life in played.lives if STEPS - 1 in life.params]
    losses = {point.step: point.loss for point in played.curve.points}
    assert task.loss(params[0]) == pytest.approx(losses[STEPS - 1], abs=1e-5)
    assert losses[STEPS] < task.loss(task.params) - 0.1  # it has learnt something


def test_curves_by_hand() -> None:
    """Steps of 2 s with 10 samples; the loss 1.5 lies half way between the first and the second step."""
    curve = curve_with({1: 2.0, 2: 1.0, 3: 1.2}, step_s=2.0, target=10)
    assert curve.samples_per_s == pytest.approx(5.0)
    assert curve.seconds_to(1.5) == pytest.approx(3.0)
    assert curve.seconds_to(2.5) == 2.0
    assert math.isnan(curve.seconds_to(0.5))
    assert curve.loss_after(2) == 1.0
    assert curve.largest_gap(curve_with({2: 1.3, 9: 7.0}, step_s=1.0, target=1)) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="in common"):
        curve.largest_gap(Curve(points=()))


def test_steps_of_the_baselines_take_what_their_slowest_part_takes(task: AlbertTask) -> None:
    """Equal batches wait for the slowest, 10 times as slow as the fastest; then vectors have to travel."""
    specs = machines(4, num_params=task.num_params)
    waits_s = 12 * 10 / FASTEST_PER_S
    assert waits_s < all_reduce_step_s(specs, target=48, num_params=task.num_params) < waits_s + 10
    computes_s = 48 / sum(1 / spec.sample_s for spec in specs)
    # The paper's server takes in 3 vectors of 36 MB at 1 Gb/s, and each workstation sends one at 200 Mb/s.
    assert computes_s + 1.4 < parameter_server_step_s(specs, target=48, num_params=task.num_params) < computes_s + 10
    with pytest.raises(ValueError, match="at least 2"):
        machines(1, num_params=10)


def test_figures_of_hand_made_curves(tmp_path: Path) -> None:
    """A swarm with steps of 1 s where one machine takes 4 s, all-reduce 2 s and the parameter server 3 s."""
    settings = CollaborativeSettings(part=("albert",), albert_peers=(4,), albert_seeds=2)
    folder = RunFolder.create(tmp_path / "run", settings, name="collaborative")
    run = Run(settings=settings, folder=folder, console=Console(quiet=True))
    assert albert_figures(run) == {}
    for seed in range(2):
        losses = {1: 3.0, 2: 2.0, 3: 1.0}
        log_curve(run, curve_with(losses, step_s=4.0, target=8), "one machine", peers=1, seed=seed)
        moved = {step: loss + 0.1 * seed for step, loss in losses.items()} | {4: 0.5}
        log_curve(run, curve_with(moved, step_s=1.0, target=8), "together", peers=4, seed=seed)
        facts = {"all_reduce_step_s": 2.0, "parameter_server_step_s": 3.0, "computed_per_s": 10.0, "target": 8}
        run.log("albert_swarm", peers=4, seed=seed, steps=3, goodput=1.0, failures=1, chains_apart=0, **facts)
    figures = albert_figures(run)
    assert figures["albert_speedup_4"] == pytest.approx(4.0)
    assert figures["albert_over_all_reduce_4"] == pytest.approx(2.0)
    assert figures["albert_over_parameter_server_4"] == pytest.approx(3.0)
    assert figures["albert_samples_per_s_4"] == pytest.approx(8.0)
    assert figures["albert_computed_share_4"] == pytest.approx(0.8)
    assert figures["albert_same_loss"] == pytest.approx(0.05)
    assert figures["albert_same_loss_max"] == pytest.approx(0.05 + 12.706 * 0.05)  # Student's t, two values
    result = EXPERIMENT.summarise(run)
    assert result is not None
    assert EXPERIMENT.draw is not None
    assert EXPERIMENT.draw(run, result) is not None
