"""The recipe for Slurm on a real cluster of two nodes on this machine."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes.slurm_cluster import asked, open_cluster, why_no_cluster

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster())]


@pytest.fixture
def slurm_cluster() -> Iterator[dict[str, str]]:
    """Environment of a cluster of two nodes."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a short path, for the socket's sake
    try:
        with open_cluster(folder) as environment:
            yield environment
    finally:
        shutil.rmtree(folder)


def test_cluster_runs_jobs_and_steps(slurm_cluster: dict[str, str], tmp_path: Path) -> None:
    """The cluster that the other tests stand on: a job of two nodes, a task on each."""
    words = ("sbatch", "--wait", "-N2", "-o", str(tmp_path / "out"), "--wrap", "srun -n2 printenv SLURMD_NODENAME")
    asked(slurm_cluster, *words)
    assert sorted((tmp_path / "out").read_text().split()) == ["n1", "n2"]
