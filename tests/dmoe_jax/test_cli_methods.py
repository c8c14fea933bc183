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
    words = [sys.executable, "-m", "dmoe_jax.cli", "up"]
    words += ["--nodes", "1", "--trainers", "2", "--grid-size", "2", "2", "--num-layers", "1", "--d-model", "64"]
    words += ["--d-ff", "8", "--num-heads", "2", "--seq-len", "4", "--mem-len", "4", "--steps", "300"]
    words += ["--average-every", "20", "--data", text, "--out", str(out), f"--train-flags={train}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = []
    for run in (out, folder / "run.trainer1"):
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found.append([each for each in records if each["kind"] == "average"])
        assert len(found[-1]) >= 3
        assert {each["peers"] for each in found[-1]} == {2}
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Bytes that leave a process in a round of the whole trunk's parameters."""
    own, others = averages_of_two(tmp_path_factory.mktemp("whole"), "--average parameters")
    return (own + others)[0]["sent_bytes"]


def near(share: float, rel: float) -> Any:
    return lambda sent, whole: sum(sent) / len(sent) == pytest.approx(share * whole, rel=rel)


TOP_K = "--average pseudo-gradients --average-compression top-k --average-kept 64"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "is_so"),
    [
        # The trunk has 2,000 numbers at least (its embedding alone, and what scores experts): 8 kB of float32. Of them
        # 64 in 4,096 leave in some bytes each, and a few for each array, in payloads of one length.
        (TOP_K, lambda sent, whole: {*sent} == {sent[0]} and sparse_nbytes(SparseCoding(), (2000,)) < sent[0] < 2000),
        # The halves are not of one length, and how often each was averaged is chance.
        ("--average pseudo-gradients --average-fragments 2", near(0.5, 0.9)),
        ("--average noloco --average-side 2", near(2.0, 0.05)),
        ("--average-share 0.05", near(0.05, 0.05)),
    ],
)
def test_two_trainers_average_by_other_methods(tmp_path: Path, whole: float, flags: str, is_so: Any) -> None:
    """The bytes of a round say what of the trunk moved: the largest, halves by turns, all twice, or a few numbers."""
    own, others = ([each["sent_bytes"] for each in averages] for averages in averages_of_two(tmp_path, flags))
    for sent in (own, others, own + others):
        assert is_so(sent, whole)
