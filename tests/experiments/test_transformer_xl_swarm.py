"""dmoe over real processes: the preset arrives at nodes and trainer, mistakes cost no process, a run can be resumed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dmoe_jax.cli.assembly import model_config as config_of_flags
from dmoe_jax.cli.common import UsageError, parse_command_line
from dmoe_jax.cli.node import NodeCommand
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.runs.run_folder import read_metrics
from experiments.local_swarm import deal_experts
from experiments.transformer_xl.presets import PRESETS, Size, model_config
from experiments.transformer_xl.run import TransformerXLCommand
from experiments.transformer_xl.swarm import node_flags, run_swarm, trainer_flags


@pytest.mark.parametrize("size", ["tiny", "full"])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_trainer_gets_the_presets_model(size: Size, bf16: bool) -> None:
    """`dmoe train` reads its flags as the configuration that the preset has elsewhere."""
    preset = PRESETS["dmoe", size]
    command = TransformerXLCommand(where="swarm", size=size, bf16=bf16)
    flags = trainer_flags(command, preset, ["127.0.0.1:1"], Path("out"))
    train: TrainCommand = parse_command_line(TrainCommand, prog="train", args=flags)
    dtype = "bfloat16" if bf16 else "float32"
    assert config_of_flags(train, 33_278) == model_config(preset, 33_278, compute_dtype=dtype)
    assert (train.steps, train.num_trainers * train.batch_size) == (preset.steps, preset.batch_size)
    rates = (train.learning_rate, train.warmup_steps, train.weight_decay, train.grad_clip)
    assert rates == (preset.learning_rate, preset.warmup_steps, preset.weight_decay, preset.grad_clip)


@pytest.mark.parametrize("size", ["tiny", "full"])
def test_the_nodes_get_the_presets_expert(size: Size) -> None:
    """`dmoe node` reads its flags as the expert that the trainer's model has, with the preset's rates."""
    preset = PRESETS["dmoe", size]
    flags = node_flags(TransformerXLCommand(where="swarm", size=size), preset, Path("nodes"), 3)
    node: NodeCommand = parse_command_line(NodeCommand, prog="node", args=flags)
    assert node.expert.make_expert() == model_config(preset, 33_278).expert()
    rates = (node.learning_rate, node.warmup_steps, node.weight_decay, node.grad_clip)
    assert rates == (
        preset.expert_learning_rate,
        preset.expert_warmup_steps,
        preset.weight_decay,
        preset.expert_grad_clip,
    )
    assert node.checkpoint_dir == Path("nodes/node3")


def test_the_commands_own_wishes_reach_the_trainer(tmp_path: Path) -> None:
    """Router, seed, steps, batch, corpus and whether to resume; a quick run is no longer than was asked for."""
    wishes: dict[str, Any] = {"router": "switch", "seed": 7, "steps": 50, "batch_size": 3, "data": "embedded"}
    command = TransformerXLCommand(where="swarm", **wishes, quick=True, resume=True, out=tmp_path, eval_tokens=0)
    flags = trainer_flags(command, PRESETS["dmoe", "tiny"], ["127.0.0.1:1", "127.0.0.1:2"], tmp_path)
    train: TrainCommand = parse_command_line(TrainCommand, prog="train", args=flags)
    assert {name: getattr(train, name) for name in wishes} == wishes
    assert (train.resume, train.out, train.join) == (True, tmp_path, ("127.0.0.1:1", "127.0.0.1:2"))
    assert train.max_minutes > 0


def test_every_expert_of_many_layers_has_one_home() -> None:
    """Dealing knows any grid: 3 layers of 2 x 3 x 5 on 7 nodes."""
    hands = deal_experts(7, num_layers=3, grid_size=(2, 3, 5))
    uids = [uid for hand in hands for uid in hand]
    assert len(uids) == len(set(uids)) == 3 * 30
    assert max(map(len, hands)) - min(map(len, hands)) <= 2


@pytest.mark.parametrize(
    ("wishes", "line"),
    [
        ({"model": ("small", "base")}, "--where swarm trains dmoe only, got --model small base"),
        ({"model": ("dmoe", "small")}, "--where swarm trains dmoe only, got --model dmoe small"),
        ({"router": "best"}, "unknown router 'best'"),
        ({"resume": True}, "there is no checkpoint in .*run to resume from"),
        ({}, r"run\.nodes is not empty"),
    ],
)
def test_a_mistake_costs_no_process(wishes: dict[str, Any], line: str, tmp_path: Path) -> None:
    """Other models, a router that is not there, nothing to resume, another run's experts: one line each."""
    (tmp_path / "run.nodes").mkdir()
    (tmp_path / "run.nodes" / "node0").touch()
    with pytest.raises(UsageError, match=line):
        run_swarm(TransformerXLCommand(where="swarm", out=tmp_path / "run", **wishes))
    assert {path.name for path in tmp_path.iterdir()} == {"run.nodes"}


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
@pytest.mark.timeout(600)
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
    reached = max(record["step"] for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "train")
    assert all(any((tmp_path / "run.nodes" / node).iterdir()) for node in ("node0", "node1"))

    second = start(out, "--resume", "--steps", str(reached + 10))
    stdout, stderr = second.communicate(timeout=400)
    assert second.returncode == 0, stderr
    assert f"continuing from step {reached}" in stderr
    assert "going on from a checkpoint" in (tmp_path / "run.logs" / "node0.log").read_text()
    headline = json.loads(stdout.splitlines()[-1])
    assert (headline["where"], headline["router"]) == ("swarm", "product_key")
    assert headline["models"]["dmoe"]["steps"] == reached + 10
