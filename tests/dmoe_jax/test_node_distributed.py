"""A node of two processes: what it answers is what one does, and neither outlives the other."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.distributed import global_state

from dmoe_jax.cli.network import NetworkOptions, join_swarm
from dmoe_jax.cli.node import NodeCommand
from dmoe_jax.experts import feedforward
from dmoe_jax.machine.cluster import coordinator_host
from dmoe_jax.mixture.expert_calls import BACKWARD, FORWARD
from dmoe_jax.node import lockstep
from dmoe_jax.node.backend import make_backends
from dmoe_jax.node.lockstep import Order, encode_order, nbytes_of_arrays, parse_header_untrusted, with_arrays
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Contact
from dmoe_net.wire import codec
from dmoe_net.wire.tensors import plain
from tests.dmoe_jax.node_rig import ask_expert, rows
from tests.dmoe_jax.training_rig import outcome

FLAGS = "--insecure-loopback --expert feedforward --d-model 16 --experts ffn.[0:2] --warm-up-rows 4"


def in_slurm(number: int, port: int) -> dict[str, str]:
    """The environment that Slurm gives to one of two processes."""
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2"}
    return step | {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number), "JAX_COORDINATOR_PORT": str(port)}


@contextlib.contextmanager
def two_processes(tmp_path: Path, *more: str, slurm: bool = False) -> Iterator[tuple[list[subprocess.Popen[str]], str]]:
    """A node of two processes with two devices each, and its contact."""
    # Below the ports that the system gives away, and another one for each process of tests.
    port = 20000 + os.getpid() % 10000
    flags = [*FLAGS.split(), "--mesh", "data=2,model=2", *more, "--distributed"]
    flags += ["auto"] if slurm else [f"127.0.0.1:{port}", "--num-processes", "2", "--process-id"]
    xla = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    env = os.environ | {"XLA_FLAGS": xla, "JAX_PLATFORMS": "cpu"}
    with contextlib.ExitStack() as stack:
        processes = []
        for number in range(2):
            log = stack.enter_context((tmp_path / f"{number}.log").open("w"))
            options: dict[str, Any] = {"env": env | (in_slurm(number, port) if slurm else {}), "stderr": log}
            command = [sys.executable, "-m", "dmoe_jax.cli", "node", *flags, *([] if slurm else [str(number)])]
            options |= {"cwd": Path(__file__).parents[2], "stdout": subprocess.PIPE, "text": True}
            process = subprocess.Popen(command, **options)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        lines = processes[0].stdout
        assert lines is not None
        found = next(filter(None, (re.search(r"--join (\S+)", line) for line in lines)), None)
        assert found is not None, (tmp_path / "0.log").read_text()
        yield processes, found[1]


async def ask(contact: str, method: str, uid: str, *tensors: np.ndarray) -> np.ndarray:
    body = {"uid": uid} | ({"id": os.urandom(8)} if method == BACKWARD else {})
    async with join_swarm(NetworkOptions(insecure_loopback=True), join=[contact]) as peer:
        reply = await ask_expert(peer.rpc, Contact.parse(contact), method, body, *tensors)
    return np.asarray(plain(reply.tensors[0]))


@pytest.mark.slow
async def test_two_processes_answer_as_one(tmp_path: Path) -> None:
    """Three updates are those of one process. Stopped and started again, both go on from the checkpoint."""
    optimizer = NodeCommand().learning.make()
    alone = make_backends({"ffn.[0:2]": feedforward(d_model=16)}, optimizer, seed=0)["ffn.1"]
    saving = "--checkpoint-dir", str(tmp_path / "experts")
    with two_processes(tmp_path, *saving) as (processes, contact):
        for step in range(3):
            x, grads = rows(3 + 2 * step, 16, seed=step), rows(3 + 2 * step, 16, seed=10)
            found = await ask(contact, BACKWARD, "ffn.1", x, grads)
            np.testing.assert_allclose(found, alone.backward([x], grads)[0], atol=1e-4)
            found = await ask(contact, FORWARD, "ffn.1", x)
            np.testing.assert_allclose(found, alone.forward([x]), atol=1e-4)
        processes[0].send_signal(signal.SIGTERM)
        logs = [(tmp_path / f"{number}.log").read_text() for number in range(2)]
        assert [process.wait(timeout=60) for process in processes] == [130, 0], logs
    assert [path.name for path in (tmp_path / "experts").iterdir()] == ["ffn.1"]
    with two_processes(tmp_path, *saving) as (_, contact):
        found = await ask(contact, FORWARD, "ffn.1", x)
        np.testing.assert_allclose(found, alone.forward([x]), atol=1e-4)


@pytest.mark.slow
async def test_two_processes_that_jax_finds(tmp_path: Path) -> None:
    """Under Slurm no process is told where the others are; they answer as one, and all leave in order."""
    (alone,) = make_backends({"ffn.1": feedforward(d_model=16)}, None, seed=0).values()
    with two_processes(tmp_path, slurm=True) as (processes, contact):
        found = await ask(contact, FORWARD, "ffn.1", rows(3, 16))
        np.testing.assert_allclose(found, alone.forward([rows(3, 16)]), atol=1e-4)
        processes[1].send_signal(signal.SIGTERM)
        logs = [(tmp_path / f"{number}.log").read_text() for number in range(2)]
        assert [process.wait(timeout=60) for process in processes] == [130, 0], logs


@pytest.mark.parametrize(
    ("address", "host"), [("node001:61440", "node001"), ("10.0.0.1:5000", "10.0.0.1"), ("[fe80::1]:5000", "fe80::1")]
)
def test_jax_tells_where_process_0_is(address: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state that `jax.distributed.initialize` leaves behind has its address."""
    assert global_state.coordinator_address is None
    monkeypatch.setattr(global_state, "coordinator_address", address)
    assert coordinator_host() == host


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [(1,), (0, 1), (1, 0)], ids=str)
async def test_whichever_is_stopped_all_leave_in_order(tmp_path: Path, stopped: tuple[int, ...]) -> None:
    """Updates are saved also if the other process is told to stop, or both are, as by Ctrl-C."""
    with two_processes(tmp_path, "--checkpoint-dir", str(tmp_path / "experts")) as (processes, contact):
        await ask(contact, BACKWARD, "ffn.1", rows(3, 16), rows(3, 16, seed=10))
        for number in stopped:
            processes[number].send_signal(signal.SIGINT)
        assert [process.wait(timeout=60) for process in processes] == [130, 0]
    assert [(tmp_path / f"{number}.log").read_text() for number in range(2)] == ["", ""]
    assert [path.name for path in (tmp_path / "experts").glob("*/*")] == ["1"]


async def test_several_processes_never_compute_in_the_loop() -> None:
    """However short the work: the loop tells the other processes of it, for whom XLA waits."""
    (placed,) = lockstep._devices(None, None)
    for device in (placed.device, placed.device.another()):
        assert await device.run(threading.get_ident, expected_s=0.0) != threading.get_ident()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_neither_outlives_the_other(tmp_path: Path, killed: int) -> None:
    """The one that is left says why it ends, and does so soon."""
    with two_processes(tmp_path) as (processes, _):
        processes[killed].kill()
        assert processes[1 - killed].wait(timeout=60) != 0
    if killed == 1:  # when process 0 is gone, JAX itself may end the other before it can speak
        sentence = "dmoe: error: process 1 of the node is gone, and with it its part of every expert"
        assert (tmp_path / "0.log").read_text().splitlines()[-1] == sentence


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--num-processes 2", "--num-processes and --process-id would have no effect without --distributed"),
        ("--distributed a:1 --num-processes 2", "--distributed needs --num-processes and --process-id"),
        ("--distributed a:1 --num-processes 2 --process-id 2", "--process-id must be from 0 to .* got 2 of 2"),
        ("--distributed a --num-processes 2 --process-id 0", "--distributed: expected .*HOST:PORT, got 'a'"),
        ("--distributed a:1 --num-processes 2 --process-id 0 --devices all", "--devices would have no effect beside"),
        ("--distributed a:1 --num-processes 2 --process-id 0 --replicas 2", "--distributed does not go together with"),
        ("--distributed auto --num-processes 2", "--num-processes and --process-id would have no effect beside"),
        ("--distributed auto --devices all", "--devices would have no effect beside --distributed"),
    ],
)
def test_wrong_flags(flags: str, line: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda status: None)  # how such a process ends; this one is pytest's
    status, error = outcome(["node", *flags.split()], capsys)
    assert status == 2
    assert re.match(f"dmoe: error: {line}", error), error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_machine_without_a_cluster(tmp_path: Path) -> None:
    """JAX finds none; one line says so, and what to do."""
    command = [sys.executable, "-m", "dmoe_jax.cli", "node", "--distributed", "auto", "--experts", "ffn.0"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 2
    line = (
        "dmoe: error: --distributed auto: JAX finds neither Slurm, Open MPI nor Kubernetes here; outside of them give"
    )
    assert done.stderr.startswith(line), done.stderr
    assert done.stderr.count("\n") == 1


def test_orders_come_back_as_they_were() -> None:
    """Every field, with arrays of several types, without elements and without dimensions."""
    arrays = {
        "inputs": (rows(3), np.zeros((3, 0), np.int64)),
        "output_grads": (np.ones((3, 2), jax.numpy.bfloat16),),
        "staleness": (np.array(1.5, np.float32),),
        "state": (np.array(True), np.array(2.5, np.float32)),
    }
    length, header, *parts = encode_order(Order(kind="run", uid="ffn.1", number=7, arrays=arrays))
    assert int.from_bytes(length, "big") == len(header)
    parsed, specs = parse_header_untrusted(bytes(header))
    body = bytearray(b"".join(parts))
    assert nbytes_of_arrays(specs) == len(body)
    found = with_arrays(parsed, specs, body)
    assert (found.kind, found.uid, found.number, found.one("keys")) == ("run", "ffn.1", 7, None)
    assert [(name, len(several)) for name, several in found.arrays.items()] == [*zip(arrays, (2, 1, 1, 2), strict=True)]
    for name, several in arrays.items():
        for a, b in zip(found.arrays[name], several, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "obey"},
        {"uid": 3},
        {"number": -1},
        {"arrays": [["state", "object", [1]]]},
        {"arrays": [["state", "float99", [1]]]},
        {"arrays": [["kind", "float32", [1]]]},
        {"arrays": [["state", "float32", [-1]]]},
        {"arrays": [["state", "float32", [2**40, 2**40]]]},
        {"arrays": [["state", "float32"]]},
        None,
    ],
)
def test_what_is_no_order_is_refused(changes: dict[str, object] | None) -> None:
    sound = {"kind": "load", "uid": "", "number": 0, "arrays": []}
    parse_header_untrusted(codec.encode(sound))
    for body in (7, {}) if changes is None else (sound | changes,):
        with pytest.raises(RemoteProtocolError):
            parse_header_untrusted(codec.encode(body))
