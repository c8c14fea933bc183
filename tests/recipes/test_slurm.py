"""The recipe for Slurm on a real cluster of two nodes on this machine."""

import json
import os
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dmoe_jax.runs.run_folder import read_metrics
from tests.recipes.slurm_cluster import asked, open_cluster, why_no_cluster

RECIPE = Path(__file__).parents[2] / "recipes" / "slurm"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster())]


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[dict[str, str]]:
    """Environment of a cluster of two nodes."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a short path, for the socket's sake
    try:
        with open_cluster(folder) as environment:
            yield environment
    finally:
        shutil.rmtree(folder)


def environment_with(cluster: dict[str, str], folder: Path, dmoe: str, **variables: str) -> dict[str, str]:
    """The cluster's environment with a `dmoe` that is this script, a folder for the swarm, and these variables."""
    script = folder / "bin" / "dmoe"
    script.parent.mkdir()
    script.write_text(f"#!/bin/bash\n{dmoe}\n")
    script.chmod(0o755)
    swarm = folder / "swarm"
    swarm.mkdir()
    path = os.pathsep.join([str(script.parent), cluster["PATH"]])
    return {**cluster, "PATH": path, "SWARM": str(swarm), "DMOE_ANNOUNCE": "127.0.0.1", **variables}


def submit(environment: dict[str, str], folder: Path, *words: str) -> str:
    """The id of a job. Its log is in the folder."""
    return asked(environment, "sbatch", "--parsable", f"--chdir={folder}", *words)


def wait_until(is_so: Callable[[], bool], what: str, folder: Path, *, within_s: float) -> None:
    """Return when it is so. Fails with what it waited for, and the ends of the logs."""
    deadline = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > deadline:
            logs = "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in sorted(folder.glob("*.log")))
            pytest.fail(f"not within {within_s:g} s: {what}\n{logs}")
        time.sleep(0.5)


def has(log: Path, text: str) -> Callable[[], bool]:
    return lambda: log.exists() and text in log.read_text()


def restarts_of(environment: dict[str, str], job: str) -> int:
    found = re.search(r"Restarts=(\d+)", asked(environment, "scontrol", "show", "job", job))
    assert found
    return int(found[1])


def state_of(environment: dict[str, str], job: str) -> str:
    found = re.search(r"JobState=(\w+)", asked(environment, "scontrol", "show", "job", job))
    assert found
    return found[1]


def test_cluster_runs_jobs_and_steps(slurm_cluster: dict[str, str], tmp_path: Path) -> None:
    """The cluster that the other tests stand on: a job of two nodes, a task on each."""
    words = ("sbatch", "--wait", "-N2", "-o", str(tmp_path / "out"), "--wrap", "srun -n2 printenv SLURMD_NODENAME")
    asked(slurm_cluster, *words)
    assert sorted((tmp_path / "out").read_text().split()) == ["n1", "n2"]


# Stands for `dmoe`: waits to be told to end, or for the status that the file of its job says.
STAND_IN = """\
echo "begins: $*"
trap 'echo ends in order; exit 130' TERM
while [ ! -s "$SWARM/$SLURM_JOB_NAME" ]; do sleep 0.1; done
exit "$(cat "$SWARM/$SLURM_JOB_NAME")"
"""


def test_jobs_begin_again_unless_that_would_help_nobody(slurm_cluster: dict[str, str], tmp_path: Path) -> None:
    """After a failure that time may heal, a kill and a warning; not after a mistake, nor for whoever cancels a job.
    An element of an array begins again by itself."""
    environment = environment_with(slurm_cluster, tmp_path, STAND_IN)
    seed, cancelled, warned = (
        submit(environment, tmp_path, f"--job-name={name}", *flags, str(RECIPE / "seed.sbatch"))
        for name, flags in (("seed", ()), ("cancelled", ()), ("warned", ("--time=1", "--signal=TERM@50")))
    )
    nodes = submit(environment, tmp_path, "--array=0-1", "--cpus-per-task=1", str(RECIPE / "nodes.sbatch"))
    trainers = submit(environment, tmp_path, "--array=0", "--cpus-per-task=1", str(RECIPE / "trainers.sbatch"))
    logs = [tmp_path / f"{name}.log" for name in ("seed", "cancelled", "dmoe-node-0", "dmoe-node-1", "dmoe-train-0")]
    for log in logs:
        wait_until(has(log, "begins"), f"{log.name} begins", tmp_path, within_s=30)

    asked(environment, "scancel", cancelled)
    asked(environment, "scancel", "--signal=KILL", f"{nodes}_1.0")
    (Path(environment["SWARM"]) / "dmoe-train").write_text("2")
    (Path(environment["SWARM"]) / "seed").write_text("75")
    wait_until(lambda: restarts_of(environment, seed) > 0, "the seed begins again after 75", tmp_path, within_s=60)
    (Path(environment["SWARM"]) / "seed").unlink()
    wait_until(
        lambda: restarts_of(environment, f"{nodes}_1") > 0, "the killed node begins again", tmp_path, within_s=60
    )
    wait_until(lambda: restarts_of(environment, warned) > 0, "the job that is told of its end", tmp_path, within_s=120)
    assert state_of(environment, cancelled) == "CANCELLED"
    assert "ends in order" in (tmp_path / "cancelled.log").read_text()
    assert state_of(environment, f"{trainers}_0") == "FAILED"
    assert [restarts_of(environment, job) for job in (cancelled, f"{trainers}_0", f"{nodes}_0")] == [0, 0, 0]
    for job in (seed, nodes, warned):
        asked(environment, "scancel", job)


def status_of(environment: dict[str, str]) -> dict[str, Any]:
    swarm = environment["SWARM"]
    words = ("dmoe", "status", "--json", "--join", f"file:{swarm}/seed/contact", "--swarm-secret-file")
    return json.loads(asked(environment, *words, f"{swarm}/secret").splitlines()[-1])


def served_by(environment: dict[str, str]) -> dict[str, set[str]]:
    """The experts that each node serves that has an answer, by its peer id."""
    nodes = status_of(environment)["nodes"]
    return {node["peer_id"]: set(node["status"]["updates"]) for node in nodes if node["status"]}


def is_ready(log: Path) -> bool:
    """True if the process that last wrote its address of metrics to this log says that it is ready."""
    urls = re.findall(r"metrics at (http://\S+/)metrics", log.read_text() if log.exists() else "")
    try:
        with urllib.request.urlopen(f"{urls[-1]}readyz", timeout=5) as answer:
            return answer.status == 200
    except (OSError, IndexError):
        return False


@pytest.mark.timeout(900)
def test_recipe_trains_and_outlives_a_node_and_a_trainer(slurm_cluster: dict[str, str], tmp_path: Path) -> None:
    """The demonstration's model: a node's step is killed and a trainer told to end, training goes on; both jobs are
    requeued, all experts are served again, the trainer goes on from its checkpoint, and the end comes in order."""
    dmoe = f'exec {sys.executable} -m dmoe_jax.cli "$@"'
    of = "layer0.[0:2].[0:2] layer1.[0:2].[0:2]"
    sizes = {"DMOE_OF": of, "DMOE_CLAIM": "5", "DMOE_GRID_SIZE": "2 2", "DMOE_STEPS": "120", "DMOE_NUM_TRAINERS": "2"}
    sizes |= {"DMOE_ROUTE": "token", "DMOE_ROUTER": "balanced", "DMOE_WARM_UP_ROWS": "64", "DMOE_EVAL_TOKENS": "1024"}
    sizes |= {"DMOE_FINAL_EVAL_TOKENS": "2048", "DMOE_EVAL_EVERY": "60", "DMOE_CHECKPOINT_PERIOD_S": "5"}
    environment = environment_with(slurm_cluster, tmp_path, dmoe, **sizes)
    secret = Path(environment["SWARM"]) / "secret"
    secret.touch(0o600)
    secret.write_text("0123456789abcdef")
    experts = {f"layer{layer}.{row}.{column}" for layer in (0, 1) for row in (0, 1) for column in (0, 1)}
    runs = [Path(environment["SWARM"]) / "runs" / f"trainer{index}" / "metrics.jsonl" for index in (0, 1)]

    def step_of(index: int) -> int:
        records = read_metrics(runs[index]) if runs[index].exists() else []
        return max((record["step"] for record in records if record["kind"] == "train"), default=0)

    # Those that join come first: they wait for the file of the seed.
    nodes = submit(environment, tmp_path, "--array=0-1", "--cpus-per-task=4", str(RECIPE / "nodes.sbatch"))
    trainers = submit(environment, tmp_path, "--array=0-1", "--cpus-per-task=4", str(RECIPE / "trainers.sbatch"))
    log = tmp_path / "dmoe-node-0.log"
    wait_until(has(log, "nobody to join through yet"), "a node waits for the seed", tmp_path, within_s=60)
    submit(environment, tmp_path, str(RECIPE / "seed.sbatch"))
    wait_until(lambda: is_ready(log), "a node is ready", tmp_path, within_s=240)
    wait_until(lambda: min(step_of(0), step_of(1)) >= 20, "both trainers train", tmp_path, within_s=300)
    before = served_by(environment)
    assert set().union(*before.values()) == experts
    assert all(len(each) <= 5 for each in before.values())  # neither has room for all

    killed_at = step_of(0)
    asked(environment, "scancel", "--signal=KILL", f"{nodes}_1.0")
    asked(environment, "scancel", "--signal=TERM", f"{trainers}_1.0")
    wait_until(lambda: step_of(0) >= killed_at + 10, "training goes on", tmp_path, within_s=120)
    wait_until(lambda: restarts_of(environment, f"{nodes}_1") == 1, "the node is requeued", tmp_path, within_s=60)
    wait_until(
        lambda: set().union(*(after := served_by(environment)).values()) == experts and set(after) == set(before),
        "all experts are served again, by peers of the same ids",
        tmp_path,
        within_s=180,
    )
    folders = [path.parent for path in runs]
    wait_until(lambda: not asked(environment, "squeue", "-h", "-j", trainers), "trainers end", tmp_path, within_s=400)
    assert [state_of(environment, f"{trainers}_{index}") for index in (0, 1)] == ["COMPLETED"] * 2
    assert [restarts_of(environment, f"{trainers}_{index}") for index in (0, 1)] == [0, 1]
    assert "continuing from step" in (tmp_path / "dmoe-train-1.log").read_text()
    for folder in folders:
        assert (folder / "report.md").exists()
        losses = [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "eval"]
        assert losses[-1] < losses[0] - 0.2  # of some 7 nats at the beginning

    for name in ("dmoe-node", "dmoe-seed"):
        asked(environment, "scancel", f"--name={name}")
    wait_until(lambda: not asked(environment, "squeue", "-h"), "all jobs end", tmp_path, within_s=30)
    assert experts <= {path.name for path in (Path(environment["SWARM"]) / "experts").iterdir()}
    assert "Traceback" not in "".join(each.read_text() for each in tmp_path.glob("*.log"))
