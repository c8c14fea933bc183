"""dmoe over real processes: the preset arrives at nodes and trainer, and a run can be interrupted and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dmoe_jax.cli.language_training import trunk_config
from dmoe_jax.cli.node import NodeCommand
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.cli.trained_models import trunk_recipe
from dmoe_jax.cli.up import UpCommand
from dmoe_jax.layer_config import Recipe, Route
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.run_folder import read_metrics
from experiments.transformer_xl.presets import chosen_preset, model_config
from experiments.transformer_xl.settings import Size, TransformerXLSettings
from experiments.transformer_xl.training import make_plan, up_flags


@pytest.mark.slow
@pytest.mark.parametrize(("size", "bf16", "route"), [("tiny", False, "sequence"), ("full", True, "token")])
def test_trainers_and_nodes_get_the_presets_model(size: Size, bf16: bool, route: Route) -> None:
    """`dmoe up` has them read their flags as the configuration, experts and rates that the preset has elsewhere."""
    settings = TransformerXLSettings(where="swarm", size=size, bf16=bf16, route=route, step_size=2.0)
    preset = chosen_preset(settings, "dmoe")
    flags = up_flags(settings, preset, make_plan(settings, preset), Path("out"))
    up: UpCommand = parse_command_line(UpCommand, prog="up", args=flags)
    train, other = (
        parse_command_line(TrainCommand, prog="train", args=["--join", "127.0.0.1:1", *up.flags_of_trainer(index)])
        for index in range(2)
    )
    assert trunk_config(train, 33_278) == model_config(preset, 33_278, settings)
    sequences = up.swarm.trainers * train.data.num_trainers * train.data.batch_size
    assert (train.run_length.steps, sequences) == (preset.steps, preset.batch_size)
    assert Recipe(**asdict(trunk_recipe(train))) == replace(preset.recipe, total_steps=preset.steps)
    assert train.averaging.average_every > 0
    assert (train.data.chance_seed, other.data.chance_seed) == (0, 1)
    node: NodeCommand = parse_command_line(NodeCommand, prog="node", args=up.flags_of_nodes())
    assert node.kind.make() == model_config(preset, 33_278, settings).expert()
    ours = replace(preset.expert_recipe, total_steps=None)
    assert Recipe(**{name: getattr(node.learning.recipe, name) for name in asdict(ours)}) == ours


def start(out: Path, *args: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "experiments.transformer_xl", "--where", "swarm", "--quick", "--json"]
    with out.with_name("stderr").open("wb") as log:
        return subprocess.Popen(
            [*command, "--steps", "60", "--data", "embedded", "--out", str(out), *args],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "DMOE_DATA": ""},
            stdout=subprocess.PIPE,
            stderr=log,
        )


@pytest.mark.slow
def test_a_swarm_is_interrupted_and_resumed(tmp_path: Path) -> None:
    """Ctrl-C leaves a report and the experts' checkpoints; --resume goes on with both, and ends in the figures that
    the other places give."""
    out, metrics = tmp_path / "run", tmp_path / "run" / "dmoe" / "seed0" / "metrics.jsonl"
    first = start(out)
    while first.poll() is None and not (metrics.exists() and metrics.read_text().count('"train"') >= 3):
        time.sleep(0.2)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=200)
    assert first.returncode == 130
    assert (out / "report.md").exists()
    assert (metrics.parent / "report.md").exists()
    assert list((out / "dmoe" / "seed0.nodes").glob("node*/layer*"))
    reached = max(record["step"] for record in read_metrics(metrics) if record["kind"] == "train")

    second = start(out, "--resume")
    stdout, _ = second.communicate(timeout=400)
    assert second.returncode == 0, (tmp_path / "stderr").read_text()
    assert any("experts go on from" in log.read_text() for log in (out / "dmoe" / "seed0.logs").glob("node*.log"))
    headline = json.loads(stdout.splitlines()[-1])
    assert (headline["where"], headline["router"], headline["runs_finished"]) == ("swarm", "product_key", 1)
    assert reached <= headline["models"]["dmoe"]["steps"] <= 60
    assert headline["models"]["dmoe"]["validation_perplexity"] > 1
