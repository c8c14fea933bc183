"""Models that train at once, each in a process of its own."""

import json
from pathlib import Path

import pytest

from dmoe_jax.runs.command_line import parse_command_line
from experiments.transformer_xl.__main__ import main
from experiments.transformer_xl.settings import TransformerXLSettings

FLAGS = ["--model", "small", "base", "--quick", "--steps", "2", "--trainers", "2", "--data", "embedded"]


def test_a_child_gets_the_settings_of_its_parent() -> None:
    """As flags, without those left out and those at their defaults."""
    settings = TransformerXLSettings(model=("dmoe", "small"), steps=7, bf16=True, delay_s=0.5, out=Path("a b"), seed=3)
    flags = settings.flags()
    assert parse_command_line(TransformerXLSettings, prog="child", args=flags) == settings
    assert settings.flags("out", "model") == [*("--seed", "3", "--steps", "7"), "--bf16", *("--delay-s", "0.5")]
    assert TransformerXLSettings().flags() == []


@pytest.mark.slow
def test_side_by_side_is_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same figures; a child's mistake is its parent's one line."""
    headlines = []
    for jobs in ("2", "1"):
        main([*FLAGS, "--jobs", jobs, "--out", str(tmp_path / jobs), "--json"])
        headlines.append(json.loads(capsys.readouterr().out.splitlines()[-1])["models"])
    for model in ("small", "base"):
        ours, theirs = (headline[model] for headline in headlines)
        assert ours["validation_perplexity"] == pytest.approx(theirs["validation_perplexity"], rel=1e-5)
        assert ours["complete"]
    config = tmp_path / "2" / "base" / "seed0" / "config.json"
    config.write_text(config.read_text().replace('"steps": 2', '"steps": 7'))
    with pytest.raises(SystemExit) as ended:
        main([*FLAGS, "--jobs", "2", "--out", str(tmp_path / "2"), "--resume"])
    assert ended.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("transformer_xl: error: the run in ")
    assert "steps" in last
