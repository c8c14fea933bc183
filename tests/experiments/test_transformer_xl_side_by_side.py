"""Models that train at once, each in a process of its own."""

import json
from pathlib import Path

import pytest

from experiments.bench import run_experiment
from experiments.transformer_xl.settings import TransformerXLSettings

FLAGS = ["--model", "small", "base", "--quick", "--steps", "2", "--trainers", "2", "--data", "embedded"]


@pytest.mark.slow
def test_side_by_side_is_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same figures; a child's mistake is its parent's one line."""
    headlines = []
    for jobs in ("2", "1"):
        run_experiment(TransformerXLSettings, args=[*FLAGS, "--jobs", jobs, "--out", str(tmp_path / jobs), "--json"])
        headlines.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    for model in ("small", "base"):
        ours, theirs = (headline["models"][model] for headline in headlines)
        assert ours["validation_perplexity"] == pytest.approx(theirs["validation_perplexity"], rel=1e-5)
    assert [headline["runs_finished"] for headline in headlines] == [2, 2]
    for model in ("small", "base"):
        seed0 = tmp_path / "2" / model / "seed0"
        (seed0 / "metrics.jsonl").unlink()
        config = (seed0 / "config.json").read_text()
        (seed0 / "config.json").write_text(config.replace('"steps": 2', '"steps": 7'))
    with pytest.raises(SystemExit) as ended:
        run_experiment(TransformerXLSettings, args=[*FLAGS, "--jobs", "2", "--out", str(tmp_path / "2"), "--resume"])
    assert ended.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("transformer_xl: error: the run in ")
    assert "steps" in last
