"""A trainer's trunk on several devices: its numbers are those of one device, and everything stays where it lies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.mesh.layout import MeshShape, laid_out, layout_of, mesh_of, rows_like
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.flags import as_flags
from dmoe_jax.runs.run_folder import flat
from dmoe_jax.trunk import SharedTrunk
from tests.dmoe_jax.test_mixture_grouped import on_eight_devices
from tests.dmoe_jax.training_rig import outcome

HINT = "(XLA_FLAGS=--xla_force_host_platform_device_count=N makes N devices of a CPU)"


@pytest.mark.slow
def test_updates_on_eight_devices() -> None:
    """See `trunk_on_eight_devices`: processes of their own, since JAX counts its devices once."""
    assert on_eight_devices("-m", "tests.dmoe_jax.trunk_on_eight_devices", "updates") == [
        "parameters by the rule",
        "parameters of one's own",
        "axes that are part of a type",
        "batches by rows",
        "rows of a process",
        "optimizers stay",
        "moments stay where they are",
        f"a mesh data=4,model=4 takes 16 devices, but there are 8 {HINT}",
        "expected a mesh such as data=2,model=4, of the axes data and model, got 'rows=2'",
        "a mesh to lay parameters out on has the axes data and model, got 'expert'; with other axes give parameters "
        "that lie on it already",
        "the sharding rule gives P('rows',) for deep/bias of shape (32,), which does not fit the mesh data=2,model=4",
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_trainers_on_eight_devices() -> None:
    """See `trunk_on_eight_devices`."""
    assert on_eight_devices("-m", "tests.dmoe_jax.trunk_on_eight_devices", "training") == [
        "gradients lie as parameters",
        "trainers learn the same",
        "several trainers at once",
        "a collaboration",
        "a run goes on elsewhere",
        "the command",
    ]


async def test_a_mesh_of_one_device_is_that_device() -> None:
    """Nothing is spread: batches stay as they are, and an update is one on the device's thread."""
    grid = np.array(jax.devices()[:1]).reshape(1, 1)
    for mesh in ("data=1", MeshShape(), Mesh(grid, ("model", "data"))):
        params = laid_out({"w": np.ones((4, 2), np.float32), "name": 1.0}, mesh)
        assert mesh_of(params) is None
        assert params["w"].committed
        batch = {"x": np.ones(4)}
        assert rows_like(params)(batch) is batch
        trunk = SharedTrunk(params, optax.sgd(0.5), InlineDevice())
        assert await trunk.apply(jax.tree.map(np.ones_like, params)) == 1
        np.testing.assert_array_equal(trunk.params["w"], np.full((4, 2), 0.5))


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            lambda: layout_of("data=64"),
            r"a mesh data=64,model=1 takes 64 devices, but there (is 1|are \d+) \(XLA_FLAGS=--",
        ),
        (lambda: layout_of("model=x"), "expected a mesh such as data=2,model=4"),
        (lambda: layout_of(Mesh(np.array(jax.devices()[:1]), ("fsdp",))), "has the axes data and model, got 'fsdp'"),
        (lambda: laid_out({"name": "x"}, "data=1"), r"parameters are arrays of numbers, \['name'\] is 'x'"),
    ],
)
def test_wrong_meshes(call: Callable[[], Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        call()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--mesh data=2,model=32", f"a mesh data=2,model=32 takes 64 devices, but there is 1 {HINT}"),
        ("--devices 0-63", f"devices '0-63' name number 63, but the last of 1 is 0 {HINT}"),
        ("--devices 0 --mesh data=2", "the mesh data=2,model=1 takes 2 devices, got 1"),
        ("--mesh rows=2", "expected a mesh such as data=2,model=4, of the axes data and model, got 'rows=2'"),
        ("--xla-threads 0", "--xla-threads must be from 1 to 256, got 0"),
        ("--distributed a:1", "--distributed needs --num-processes and --process-id, unless it is auto"),
        ("--distributed auto", "--distributed makes one trainer of all processes: give --num-trainers 1, got 4"),
        (
            "--distributed auto --num-trainers 1 --max-minutes 1",
            "--max-minutes does not go together with --distributed: give --steps",
        ),
        (
            "--distributed auto --num-trainers 1 --checkpoint-every 5",
            "--checkpoint-every does not go together with --distributed, which saves every --eval-every",
        ),
        ("--process-id 1", "--num-processes and --process-id would have no effect without --distributed"),
    ],
)
def test_wrong_flags_of_a_trainer(
    flags: str, line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line and a status, before the trainer joins anything or writes."""
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "--join", "127.0.0.1:1", "--data", "embedded", *flags.split()]
    assert outcome(arguments, capsys) == (2, f"dmoe: error: {line}\n")
    assert not list(tmp_path.iterdir())


def test_a_runs_folder_has_its_mesh() -> None:
    """It is among the settings, which a resumed run may change; the numbers of processes are not."""
    words = ["--join", "a:1", *as_flags({"mesh": "model=4", "devices": "0-3", "xla_threads": 2})]
    settings = flat(parse_command_line(TrainCommand, prog="dmoe train", args=words).settings())
    by_name = {name.rpartition(".")[2]: value for name, value in settings.items()}
    assert [by_name[name] for name in ("mesh", "devices", "xla_threads")] == ["model=4", "0-3", 2]
    assert not {"distributed", "process_id", "num_processes"} & {*by_name}
