"""The report of a run."""

from pathlib import Path

import pytest

from dmoe_jax.runs.report import MAX_EVENTS, ReportTable, final_evaluation, format_value, write_report
from dmoe_jax.runs.run_folder import RunFolder


def test_report_by_hand(tmp_path: Path) -> None:
    """Headline, figure, events, nested settings and the command are all there."""
    folder = RunFolder.create(tmp_path, {"steps": 10, "expert": {"d_ff": 64, "name": "a|b"}})
    folder.log("event", name="node_killed", step=5, time_s=65.4, detail="node3 | gone\nfor good")
    folder.log("event", name="resumed")
    (tmp_path / "figure.png").write_bytes(b"")
    headline = {"final_perplexity": 512.345, "calls": 12345, "learnt": True, "share": None}
    path = write_report(folder, headline, title="Demo", summary="On WikiText-2.", command="just demo --seed 1")
    lines = path.read_text().splitlines()
    assert path == tmp_path / "report.md"
    assert lines[:3] == ["# Demo", "", "On WikiText-2."]
    for line in (
        "| final perplexity | 512.3 |",
        "| calls | 12,345 |",
        "| learnt | yes |",
        "| share | – |",
        "| 5 | 1:05 | node killed | node3 \\| gone for good |",
        "| – | – | resumed |  |",
        "| `steps` | 10 |",
        "| `expert.d_ff` | 64 |",
        "| `expert.name` | a\\|b |",
        "just demo --seed 1",
    ):
        assert line in lines
    assert sum("](figure.png)" in line for line in lines) == 1


def test_report_of_a_quiet_run(tmp_path: Path) -> None:
    """Without events, figure or command it says so, leaves the figure out, and gives the command that ran."""
    folder = RunFolder.create(tmp_path, {})
    text = write_report(folder, {}).read_text()
    assert "Nothing out of the ordinary." in text
    assert "figure.png" not in text
    assert folder.config()["command"] in text
    assert f"python {folder.config()['versions']['python']}" in text


def test_what_a_run_lost_is_out_of_the_ordinary(tmp_path: Path) -> None:
    """Failed calls with their reasons, samples without experts, missed averages; not what is 0."""
    folder = RunFolder.create(tmp_path, {})
    headline = {
        **{"calls_ok": 1184, "calls_failed": 16, "failures": {"unreachable": 12, "late": 4}},
        **{"samples_without_experts": 3, "averages_missed": 2, "averages_rejected": 0, "failed: no group found": 45},
    }
    text = write_report(folder, headline).read_text()
    assert "Nothing out of the ordinary" not in text
    assert "| – | – | calls failed | 16 of 1,200: unreachable 12, late 4 |" in text
    assert "| – | – | samples without experts | 3 in all |" in text
    assert "| – | – | averages missed | 2 in all |" in text
    assert "| – | – | failed: no group found | 45 in all |" in text
    assert "| – | – | averages rejected" not in text


def test_the_final_figure_is_told_from_the_curve(tmp_path: Path) -> None:
    """By the words that each is over; nothing is said where they are the same."""
    folder = RunFolder.create(tmp_path, {})
    folder.log("task", name="text", unit="tokens")
    folder.log("eval", step=5, split="valid", perplexity=66.5, loss=4.2, items=8192)
    for split, perplexity in (("valid", 73.5), ("test", 80.0)):
        folder.log("final_eval", step=5, split=split, perplexity=perplexity, loss=4.3, items=16384)
    sentence = "The final perplexity, over 16,384 words: 73.5. Each point of the curve is over 8,192 words."
    assert sentence in write_report(folder, {}).read_text()
    assert final_evaluation(folder.metrics()) == ("final perplexity, over 16,384 words: 73.5", "8,192 words")
    folder.log("eval", step=5, split="valid", perplexity=73.5, loss=4.3, items=16384)
    assert sentence not in write_report(folder, {}).read_text()


def test_report_is_bounded(tmp_path: Path) -> None:
    """A run of many events gets a table of the first ones and the number of the others."""
    folder = RunFolder.create(tmp_path, {})
    for step in range(MAX_EVENTS + 3):
        folder.log("event", name="lost_step", step=step)
    text = write_report(folder, {}).read_text()
    assert text.count("| lost step |") == MAX_EVENTS
    assert "and 3 more in metrics.jsonl." in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00012345, "0.0001234"),
        (1234.56, "1,235"),
        (123456.7, "123,457"),
        (1e20, "1e+20"),
        (-20000.0, "-20,000"),
        ([4, 4], "4, 4"),
        ("as it is", "as it is"),
    ],
)
def test_values_for_readers(value: object, text: str) -> None:
    """Four significant digits, thousands apart."""
    assert format_value(value) == text


def test_tables_follow_the_figure(tmp_path: Path) -> None:
    """Each with its heading and its note; a row of another length is refused at once."""
    folder = RunFolder.create(tmp_path, {})
    tables = [
        ReportTable(title="Routers", head=("router", "perplexity"), rows=[("a|b", 512.345)], note="At the end."),
        ReportTable(title="Nothing", head=("x",), rows=[]),
    ]
    text = write_report(folder, {"calls": 3}, tables=tables).read_text()
    first = "## Routers\n\n| router | perplexity |\n| --- | --- |\n| a\\|b | 512.3 |\n\nAt the end.\n\n"
    assert f"| calls | 3 |\n\n{first}## Nothing\n\n| x |\n| --- |\n\n## What happened" in text
    with pytest.raises(ValueError, match=r"rows of 2 cells, x, y, got \(1,\)"):
        ReportTable(title="Wrong", head=("x", "y"), rows=[(1, 2), (1,)])
