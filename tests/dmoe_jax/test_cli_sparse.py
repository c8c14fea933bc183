"""Real processes whose trunks are averaged by their largest changes alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from net.wire.sparse import SparseCoding, sparse_nbytes


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_trainers_average_with_top_k(tmp_path: Path) -> None:
    """Over TLS, beside training: in each round one payload leaves a process, as long as the other's."""
    out, text = tmp_path / "run", tmp_path / "my.txt"
    text.write_text("the cat sat on the mat .\n" * 1000)
    train = "--average pseudo-gradients --average-compression top-k --average-kept 64 --average-window-s 3"
    train += " --eval-tokens 64 --final-eval-tokens 64"
    words = ["up", "--nodes", "1", "--trainers", "2", "--grid-size", "2", "2", "--num-layers", "1", "--d-model", "64"]
    words += ["--d-ff", "8", "--num-heads", "2", "--seq-len", "4", "--mem-len", "4", "--steps", "300"]
    words += ["--average-every", "20", "--data", str(text), "--out", str(out), f"--train-flags={train}"]
    done = subprocess.run(
        [sys.executable, "-m", "dmoe_jax.cli", *words], capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sent = list[float]()
    for folder in (out, tmp_path / "run.trainer1"):
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        averages = [each for each in records if each["kind"] == "average"]
        assert len(averages) >= 3
        assert {each["peers"] for each in averages} == {2}
        sent += [each["sent_bytes"] for each in averages]
        settings = json.loads((folder / "config.json").read_text())
        assert "top-k" in json.dumps(settings)
    # The trunk has 2,000 numbers at least (its embedding alone, and what scores experts): 8 kB of float32. Of them
    # 64 in 4,096 leave in some bytes each, and a few for each array.
    assert len(set(sent)) == 1
    assert sparse_nbytes(SparseCoding(), (2000,)) < sent[0] < 2000
