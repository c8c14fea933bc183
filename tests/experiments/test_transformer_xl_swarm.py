"""dmoe over real processes: the preset arrives at nodes and trainer, mistakes cost no process, a run can be resumed."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dmoe_jax.cli.language_training import trunk_config
from dmoe_jax.cli.node import NodeCommand
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.cli.trained_models import trunk_recipe
from dmoe_jax.layer_config import Recipe, Route
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.run_folder import read_metrics
from experiments.transformer_xl.presets import PRESETS, model_config
from experiments.transformer_xl.settings import Size, TransformerXLSettings
from experiments.transformer_xl.swarm import node_flags, trainer_flags, trainer_folder


@pytest.mark.parametrize("size", ["tiny", "full"])
@pytest.mark.parametrize(("bf16", "route"), [(False, "sequence"), (True, "token")])
def test_the_trainer_gets_the_presets_model(size: Size, bf16: bool, route: Route) -> None:
    """`dmoe train` reads its flags as the configuration that the preset has elsewhere."""
    preset = PRESETS["dmoe", size]
    command = TransformerXLSettings(where="swarm", size=size, bf16=bf16, route=route)
    flags = trainer_flags(command, ["127.0.0.1:1"], Path("out"))
    train: TrainCommand = parse_command_line(TrainCommand, prog="train", args=flags)
    dtype = "bfloat16" if bf16 else "float32"
    assert trunk_config(train, 33_278) == model_config(preset, 33_278, compute_dtype=dtype, route=route)
    sequences = command.processes * train.data.num_trainers * train.data.batch_size
    assert (train.run_length.steps, sequences) == (preset.steps, preset.batch_size)
    assert Recipe(**asdict(trunk_recipe(train))) == replace(preset.recipe, total_steps=preset.steps)


@pytest.mark.parametrize(("size", "route"), [("tiny", "sequence"), ("full", "token")])
def test_the_nodes_get_the_presets_expert(size: Size, route: Route) -> None:
    """`dmoe node` reads its flags as the expert that the trainer's model has, with the preset's rates."""
    preset = PRESETS["dmoe", size]
    flags = node_flags(TransformerXLSettings(where="swarm", size=size, route=route), Path("nodes"), 3)
    node: NodeCommand = parse_command_line(NodeCommand, prog="node", args=flags)
    assert node.kind.make() == model_config(preset, 33_278, route=route).expert()
    ours = node.learning.recipe
    rates = (ours.learning_rate, ours.warmup_steps, ours.weight_decay, ours.grad_clip, ours.staleness_power)
    recipe = preset.expert_recipe
    assert rates[:4] == (recipe.learning_rate, recipe.warmup_steps, recipe.weight_decay, recipe.grad_clip)
    assert rates[4] == recipe.staleness_power
    assert node.saving.checkpoint_dir == Path("nodes/node3")


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_trainer_processes_share_the_batch_and_average(processes: int, tmp_path: Path) -> None:
    """Equal parameters, own text, one group; alone there is nothing to average. Only the first reads all text."""
    command = TransformerXLSettings(where="swarm", seed=5, processes=processes, average_every=7)
    trains: list[TrainCommand] = []
    for index in range(processes):
        flags = trainer_flags(command, ["127.0.0.1:1"], tmp_path / str(index), index)
        trains.append(parse_command_line(TrainCommand, prog="train", args=flags))
    assert {train.data.seed for train in trains} == {5}
    assert [train.data.data_seed for train in trains] == list(range(5, 5 + processes))
    assert {train.averaging.average_every for train in trains} == {7 if processes > 1 else 0}
    assert {train.averaging.meeting.side for train in trains} <= {processes, 4}
    assert (
        sum(train.data.num_trainers * train.data.batch_size for train in trains) <= PRESETS["dmoe", "tiny"].batch_size
    )
    assert [train.run_length.final_eval_tokens == 0 for train in trains] == [index == 0 for index in range(processes)]


def test_a_resumed_run_may_have_more_processes(tmp_path: Path) -> None:
    """Those that have a checkpoint go on; a new one begins, and finds the others ahead."""
    (tmp_path / "run" / "trainer0" / "checkpoints").mkdir(parents=True)
    command = TransformerXLSettings(where="swarm", out=tmp_path / "run", resume=True)
    folders = [trainer_folder(tmp_path / "run", index) for index in range(2)]
    resumed = [
        "--resume" in trainer_flags(command, ["127.0.0.1:1"], folder, index) for index, folder in enumerate(folders)
    ]
    assert resumed == [True, False]


def start(out: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "experiments.transformer_xl", "--where", "swarm", "--quick", "--json"]
    return subprocess.Popen(
        [*command, "--data", "embedded", "--nodes", "2", "--out", str(out), *args],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "DMOE_DATA": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_swarm_is_interrupted_and_resumed(tmp_path: Path) -> None:
    """Ctrl-C leaves a report and the experts' checkpoints; --resume goes on with both; then all say the same steps."""
    out = tmp_path / "run"
    first = start(out, "--steps", "150")
    assert first.stderr is not None
    for line in first.stderr:
        if line.startswith("step ") and "/150" in line and not line.startswith("step 1/"):
            break
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=120)
    assert first.returncode == 130
    assert (out / "report.md").exists()
    assert (out / "trainer0" / "report.md").exists()
    metrics = read_metrics(out / "trainer0" / "metrics.jsonl")
    reached = max(record["step"] for record in metrics if record["kind"] == "train")
    assert all(any((out / "nodes" / node).iterdir()) for node in ("node0", "node1"))

    second = start(out, "--resume", "--steps", str(reached + 10))
    stdout, stderr = second.communicate(timeout=400)
    assert second.returncode == 0, stderr
    assert f"continuing from step {reached}" in stderr
    assert "experts go on from" in (out / "logs" / "node0.log").read_text()
    headline = json.loads(stdout.splitlines()[-1])
    assert (headline["where"], headline["router"]) == ("swarm", "product_key")
    assert headline["models"]["dmoe"]["steps"] == reached + 10
