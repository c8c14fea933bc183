"""Sweeps on clusters for real, one worker of which is lost: the table of one machine, bit for bit."""

import csv
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from experiments.paper.settings import is_timing
from tests.experiments.test_helper_processes import processes_of
from tests.recipes.slurm_cluster import asked, open_cluster, why_no_cluster

ROOT = Path(__file__).parents[2]
FLAGS = ["--routers", "product_key", "hash", "--seeds", "0", "1", "2", "--where", "emulated", "--trainers", "4"]
FLAGS += ["--steps", "16", "--eval-every", "4", "--quick", "--data", "embedded", "--jobs", "2"]

pytestmark = pytest.mark.slow


def missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def environment_of(folder: Path, own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """One thread for each run: XLA's results differ in their last bits with its number of threads."""
    path = os.pathsep.join(map(str, [ROOT, ROOT / "net"]))
    return {
        **own,
        "NPROC": "1",
        "PYTHONPATH": path + os.pathsep + own.get("PYTHONPATH", ""),
        "TEST_MARKER": str(folder),
    }


def table(out: Path) -> list[dict[str, str]]:
    """The rows of results.csv, without what was timed."""
    with (out / "results.csv").open(newline="") as file:
        return [{name: text for name, text in row.items() if not is_timing(name)} for row in csv.DictReader(file)]


def swept(out: Path, on: str, environment: Mapping[str, str], after_first: Callable[[], object] = lambda: None) -> str:
    """Sweep to the end, and do something once the first run has ended; return what it printed."""
    command = [sys.executable, "-m", "experiments.compare_routers", *FLAGS, "--out", str(out), "--on", on]
    lines = []
    with subprocess.Popen(command, cwd=ROOT, env=dict(environment), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.endswith("has ended; 5 are left\n"):
                after_first()
    assert process.returncode == 0, "".join(lines)
    return "".join(lines)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The table of this machine."""
    out = tmp_path_factory.mktemp("here") / "run"
    swept(out, "here", environment_of(out))
    rows = table(out)
    assert len({(row["label"], row["seed"]) for row in rows}) == 6
    assert len({row["validation_perplexity"] for row in rows}) == 6
    return rows


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_interrupted_sweep_leaves_no_process_and_goes_on(
    tmp_path: Path, how: signal.Signals, expected: list[dict[str, str]]
) -> None:
    """Its helpers end with it, whatever they do; gone on with, it has the table of a sweep that nobody interrupted.

    Signalled while both runs are on their way: one that was interrupted behind its last pause has other loads."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "experiments.compare_routers", *FLAGS, "--out", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment_of(out), text=True, **pipes) as process:
        lines = []
        # The helpers hold standard error: it closes with the last of them.
        for line in process.stderr:
            lines.append(line)
            if ", step 4: " in line:
                process.send_signal(how)
    assert process.returncode == (130 if how is signal.SIGTERM else -signal.SIGKILL)
    assert (how is signal.SIGKILL) or lines[-1] == "compare_routers: interrupted; --resume goes on\n"
    assert processes_of(str(out)) == []
    if how is signal.SIGTERM:
        return
    printed = subprocess.run([*command, "--resume"], cwd=ROOT, env=environment_of(out), capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    assert "6 of 6 runs are to be trained\n" in printed.stdout
    assert table(out) == expected


@pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster() or "there is Slurm")
@pytest.mark.skipif(missing("submitit"), reason="without submitit: pip install 'dmoe_jax[slurm]'")
def test_slurm_gives_the_table_of_one_machine(expected: list[dict[str, str]]) -> None:
    """One job is cancelled on its way: it is submitted again."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a short path, for the socket's sake
    try:
        with open_cluster(folder) as cluster:
            environment = environment_of(folder, cluster)

            def cancel_one() -> None:
                running = ("squeue", "--noheader", "--states=RUNNING", "--format=%A")
                # The second of the first two may be at its very end, too: one of those that follow.
                while not (jobs := {*asked(environment, *running).split()} - {"1", "2"}):
                    time.sleep(0.2)
                asked(environment, "scancel", jobs.pop())

            said = swept(folder / "run", "slurm", environment, cancel_one)
            assert asked(environment, "squeue", "--noheader") == ""
        assert table(folder / "run") == expected
        assert said.count("begun again") == 1
    finally:
        shutil.rmtree(folder)


@contextmanager
def dask_cluster(folder: Path, workers: int) -> Iterator[tuple[str, list["subprocess.Popen[bytes]"]]]:
    """Address of a scheduler, and the processes of its workers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    dask = [sys.executable, "-m", "distributed.cli.dask_"]
    own = {"env": environment_of(folder), "cwd": ROOT}
    address = f"127.0.0.1:{port}"
    commands = [[f"{dask[2]}scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]]
    for number in range(workers):
        words = ["--no-nanny", "--nthreads", "1", "--no-dashboard", "--local-directory", str(folder / str(number))]
        commands.append([f"{dask[2]}worker", address, *words])
    with ExitStack() as stack:
        processes = []
        for command in commands:
            processes.append(subprocess.Popen([*dask[:2], *command], **own))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        yield address, processes[1:]


@pytest.mark.skipif(missing("distributed"), reason="without distributed: pip install 'dmoe_jax[dask]'")
def test_dask_gives_the_table_of_one_machine(tmp_path: Path, expected: list[dict[str, str]]) -> None:
    """One of two workers is killed on its way: the other does what that had begun."""
    with dask_cluster(tmp_path, 2) as (address, workers):
        said = swept(tmp_path / "run", f"dask:{address}", environment_of(tmp_path), workers[0].kill)
    assert table(tmp_path / "run") == expected
    assert said.count("begun again") == 1


@pytest.mark.skipif(missing("ray"), reason="without ray: pip install 'dmoe_jax[ray]'")
def test_ray_gives_the_table_of_one_machine(tmp_path: Path, expected: list[dict[str, str]]) -> None:
    swept(tmp_path / "run", "ray", environment_of(tmp_path))
    assert table(tmp_path / "run") == expected
