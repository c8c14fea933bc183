"""The experiment on one large batch: its bookkeeping on hand-made lives, a short run, and real processes."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dmoe_jax.collaboration import GlobalStep
from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run
from experiments.collaborative.measurement import EXPERIMENT, measure
from experiments.collaborative.regression import regression
from experiments.collaborative.scenes import Played, batch_figures
from experiments.collaborative.settings import CollaborativeSettings, Part
from experiments.collaborative.world import Life, PeerSpec, compare_with_one_machine, members_of

STEP = GlobalStep(number=1, peers=2, samples=8.0, own_samples=4.0, gathered_s=1.0, averaged_s=0.1, attempts=1)


def life(name: str, **changes: object) -> Life:
    """One that gathered a micro-batch of four samples for step 1."""
    made = Life(name, PeerSpec(name=name, sample_s=0.5), 0.0)
    made.batches = {1: [0]}
    for field, value in changes.items():
        setattr(made, field, value)
    return made


def test_whose_samples_are_in_a_step_of_which_one_member_died() -> None:
    """The dead one's are if the sum says so. A step whose sum nothing explains is found out."""
    dead, alive = life("dead", ended=1.0), life("alive", steps=[STEP])
    assert members_of([dead, alive], 1) == [alive, dead]
    alive.steps = [replace(STEP, samples=4.0)]
    assert members_of([dead, alive], 1) == [alive]
    alive.steps = [replace(STEP, samples=6.0)]
    assert members_of([dead, alive], 1) is None
    assert compare_with_one_machine(regression(), [dead, alive], 1).unexplained == (1,)


def test_a_peer_with_other_parameters_is_found_out() -> None:
    problem = regression()
    alive = life("alive", steps=[replace(STEP, samples=4.0)], params={1: problem.params}, chains={1: b"a"})
    other = life("other", params={}, chains={1: b"b"}, batches={})
    found = compare_with_one_machine(problem, [alive, other], 1)
    assert found.difference > 1e-3  # nobody stepped
    assert found.chains_apart == 1


def test_figures_of_batches_are_those_of_hand_made_steps() -> None:
    """Two of three batches, the first of all left out, are within 5 %; four samples of 0.5 s in 4 s are half idle."""
    samples = (100.0, 1024.0, 1070.0, 1100.0)
    steps = [replace(STEP, number=number, samples=each) for number, each in enumerate(samples, 1)]
    one = life("one", steps=steps, stepped_at=[1.0, 2.0, 3.0, 4.0], computed=4, peer=object())
    figures = batch_figures(Played(1024, lives=[one], ended_at=4.0))
    assert figures["batch_within_5_percent"] == pytest.approx(2 / 3)
    assert figures["most_idle"] == pytest.approx(0.5)


def check_bars(folder: Path, *part: Part) -> None:
    """Measure these parts; all bars are met."""
    settings = CollaborativeSettings(part=part, real_minutes=0.2)
    run = Run(
        settings=settings,
        folder=RunFolder.create(folder, settings, name="collaborative"),
        console=Console(quiet=True),
    )
    assert EXPERIMENT.summarise(run) is None
    measure(run)
    result = EXPERIMENT.summarise(run)
    assert result is not None
    assert result.missed_bars == []


@pytest.mark.slow
def test_a_run_meets_its_bars(tmp_path: Path) -> None:
    check_bars(tmp_path / "run", "equal", "batches")


@pytest.mark.slow
def test_real_processes_over_tls_survive_a_kill_of_each_kind(tmp_path: Path) -> None:
    check_bars(tmp_path / "run", "real")
