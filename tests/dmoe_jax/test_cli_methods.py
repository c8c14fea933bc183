"""Real processes whose trunks are averaged in other ways than as a whole."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dmoe_net.wire.sparse import SparseCoding, sparse_nbytes
from tests.dmoe_jax.training_rig import text_of_few_words


def averages_of_two(folder: Path, flags: str) -> list[list[dict[str, Any]]]:
    """Records of averages in the metrics of two trainers over TLS, a list for each."""
    out, text = folder / "run", text_of_few_words(folder)
    train = f"{flags} --average-window-s 3 --eval-tokens 64 --final-eval-tokens 64"
    words = ["up", "--nodes", "1", "--trainers", "2", "--grid-size", "2", "2", "--num-layers", "1", "--d-model", "64"]
    words += ["--d-ff", "8", "--num-heads", "2", "--seq-len", "4", "--mem-len", "4", "--steps", "300"]
    words += ["--average-every", "20", "--data", text, "--out", str(out), f"--train-flags={train}"]
    done = subprocess.run(
        [sys.executable, "-m", "dmoe_jax.cli", *words], capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = []
    for run in (out, folder / "run.trainer1"):
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found.append([each for each in records if each["kind"] == "average"])
    return found


@pytest.mark.slow
def test_two_trainers_average_with_top_k(tmp_path: Path) -> None:
    """Over TLS, beside training: in each round one payload leaves a process, as long as the other's."""
    flags = "--average pseudo-gradients --average-compression top-k --average-kept 64"
    sent = list[float]()
    for averages in averages_of_two(tmp_path, flags):
        assert len(averages) >= 3
        assert {each["peers"] for each in averages} == {2}
        sent += [each["sent_bytes"] for each in averages]
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert "top-k" in json.dumps(settings)
    # The trunk has 2,000 numbers at least (its embedding alone, and what scores experts): 8 kB of float32. Of them
    # 64 in 4,096 leave in some bytes each, and a few for each array.
    assert len(set(sent)) == 1
    assert sparse_nbytes(SparseCoding(), (2000,)) < sent[0] < 2000


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Bytes that leave a process in a round of the whole trunk's parameters."""
    own, others = averages_of_two(tmp_path_factory.mktemp("whole"), "--average parameters")
    sent: float = (own + others)[0]["sent_bytes"]
    return sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "share"),
    [
        ("--average pseudo-gradients --average-fragments 2", 0.5),
        ("--average noloco --average-side 2", 2.0),
        ("--average-share 0.05", 0.05),
    ],
)
def test_two_trainers_average_by_other_methods(tmp_path: Path, whole: float, flags: str, share: float) -> None:
    """The bytes of a round say which part of the trunk moved: halves by turns, the trunk twice, or a few numbers."""
    for averages in averages_of_two(tmp_path, flags):
        assert len(averages) >= 3
        assert {each["peers"] for each in averages} == {2}
        mean = sum(each["sent_bytes"] for each in averages) / len(averages)
        # The halves are not of one length, and how often each was averaged is chance.
        assert mean == pytest.approx(share * whole, rel=0.9 if share == 0.5 else 0.05)
