"""Help pages that can be read, flags that are guessed right, and flags out of runs, files and the environment."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dmoe_jax.cli import main
from dmoe_jax.cli.sources import Given, gather
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.cli.up import UpCommand
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.flags import flags_of, words_of
from dmoe_jax.runs.run_folder import plain
from dmoe_jax.training.prepared_run import check_code
from tests.dmoe_jax.test_cli import check_one_line
from tests.dmoe_jax.training_rig import outcome, parsed


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("train --join a:1 --lr 1", "did you mean --learning-rate?"),
        ("train --join a:1 --nodes 2", "--nodes is a flag of dmoe up;"),
        ("up --k-best 2", "a flag of dmoe train: dmoe up --train-flags='--k-best ...' hands it on;"),
        ("up --grad-clips 2", "did you mean --grad-clip?"),
        ("up --resume", "--resume needs --out"),
        ("up --data nowhere.txt", "--data nowhere.txt: there is no such file"),
        ("up --seed -1", "--seed must be from 0 to 4294967294, got -1"),
        ("up --trunk-optimizer a.py:b --learning-rate 1", "--learning-rate would have no effect beside"),
        ("train --join a:1 --seed 4294967296", "--seed must be from 0 to 4294967295, got 4294967296"),
        ("train --join a:1 --data-seed -5", "--data-seed must be from 0 to 4294967295, got -5"),
        ("train --join a:1 --optimizer nowhere.py:b", "--optimizer of dmoe node and dmoe up"),
        ("train --join a:1 --router swich", "unknown router 'swich' (did you mean switch?)"),
        ("node --experts layer[0:2].[0:2]", "one pattern for each layer, layer0.[0:2] layer1.[0:2] ..."),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(
    args: str, line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never with the flag that was just refused."""
    monkeypatch.chdir(tmp_path)
    status, error = outcome(args.split(), capsys)
    assert (status, error.count("\n")) == (2, 1)
    assert line in error
    assert not list(tmp_path.iterdir())
    guess = re.search(r"did you mean (--[\w-]+)", error)
    assert guess is None or guess[1] not in args.split()


def test_help_is_joined_and_grouped_at_80_columns(capsys: Any, monkeypatch: Any) -> None:
    """Every flag once, under the title of its group; lines are as full as they can be."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    page = capsys.readouterr().out
    listed = re.findall(r"^  --(?:no-)?([\w-]+)", page, re.MULTILINE)
    assert sorted(listed) == sorted(flag.word[2:] for flag in flags_of(TrainCommand))
    titles = re.findall(r"^([a-z ]+):$", page, re.MULTILINE)
    assert titles[:2] == ["options", "model"]
    assert titles.index("run") < titles.index("averaging") < titles.index("network")
    lines = page.splitlines()
    for line, following in itertools.pairwise(lines):
        if line.startswith("      ") and following.startswith("      "):
            assert len(line) + 1 + len(following.split()[0]) > 80, line


def test_flags_become_words_and_flags_again(tmp_path: Path) -> None:
    """Those that are not as they are by default, by the names that they have on the command line."""
    args = ["--nodes", "3", "--expert", "a.py:b", "--grid-size", "2", "4", "--no-save-experts", "--insecure-loopback"]
    up: UpCommand = parse_command_line(UpCommand, prog="dmoe up", args=[*args, "--out", str(tmp_path)])
    assert sorted(words_of(up, without=("--out",))) == sorted(args)
    # A value may look like a flag.
    handed = ["--train-flags=--k-best 2", "--node-flags=--grad-clip 2"]
    up = parse_command_line(UpCommand, prog="dmoe up", args=handed)
    assert sorted(words_of(up)) == sorted(handed)
    # What is so by default may be said, and undoes the opposite before it.
    for words, saves in ((["--save-experts"], True), (["--no-save-experts", "--save-experts"], True)):
        assert parse_command_line(UpCommand, prog="dmoe up", args=words).swarm.save_experts is saves


def test_up_goes_on_with_the_flags_of_the_run(tmp_path: Path) -> None:
    """Those that are given now come last; a file that the run names is run only if it is named again, or trusted."""
    out = tmp_path / "run"
    own = {"model": "a.py:model", "train_flags": "--k-best 2", "node_flags": "--warm-up-rows 4"}
    begun: UpCommand = parsed(UpCommand, out=out, nodes=3, steps=40, learning_rate=0.1, **own)
    (tmp_path / "run.logs").mkdir()
    (tmp_path / "run.logs" / "up.json").write_text(json.dumps(words_of(begun, without=("--out",))))

    def resumed(*args: str) -> UpCommand:
        words = ["--resume", "--out", str(out), *args]
        return parse_command_line(UpCommand, prog="dmoe up", args=words).resumed(Given(typed=words))

    assert begun.to_go_on() == f"dmoe up --resume --out {out} --trust-run"
    up = resumed("--trust-run", "--steps", "80")
    assert (up.swarm.nodes, up.run_length.steps, up.adam.learning_rate, up.folder.resume) == (3, 80, 0.1, True)
    assert (up.swarm.train_flags, up.swarm.node_flags) == ("--k-best 2", "--warm-up-rows 4")
    trainer = parse_command_line(TrainCommand, prog="train", args=["--join", "a:1", *up.flags_of_trainer(0)])
    assert (trainer.run_length.steps, trainer.trunk.recipe.learning_rate, trainer.model) == (80, 0.1, "a.py:model")
    # What is as by default now may have been otherwise in the run's folder, and is said.
    assert "--batch-size" in up.flags_of_trainer(0)
    assert "--batch-size" not in begun.flags_of_trainer(0)
    assert resumed("--model", "a.py:model").code.model == "a.py:model"
    with pytest.raises(UsageError, match=r"name a\.py:model again, or give --trust-run"):
        resumed()
    with pytest.raises(UsageError, match="--nodes must be 3 as before"):
        resumed("--trust-run", "--nodes", "2")
    (tmp_path / "run.logs" / "up.json").unlink()
    with pytest.raises(UsageError, match="is no run of dmoe up"):
        resumed()


def test_a_file_counts_as_named_where_it_stands_in_a_word(tmp_path: Path) -> None:
    """A flag may have its value in the same word."""
    for named in (["--model", "a.py:b"], ["--model=a.py:b"]):
        check_code(tmp_path, ["--steps", "3", "--model", "a.py:b"], named=named)
    for others in ([], ["--out", "x"], ["--model=a.py:c"], ["aa.py:b"]):
        with pytest.raises(ValueError, match=r"code out of .*a\.py, .*name a\.py:b again, or give --trust-run"):
            check_code(tmp_path, ["--steps", "3", "--model", "a.py:b"], named=others)


@pytest.mark.parametrize(
    "flags", ["--model a.py:b", "--model=a.py:b", "--model 'a.py':b", '--model "a".py:b', "a.p\\y:b"]
)
def test_no_file_hides_in_flags_that_are_handed_on(flags: str, tmp_path: Path) -> None:
    """They are one word, which a shell would take apart; it counts as named as a whole."""
    check_code(tmp_path, ["--train-flags", flags], named=[f"--train-flags={flags}"])
    for named in ([], ["b"], ["--k-best", "2"], ["--train-flags", "--model c.py:b"]):
        with pytest.raises(ValueError, match=r"would run code out of "):
            check_code(tmp_path, ["--train-flags", flags], named=named)
    with pytest.raises(ValueError, match=r"out of .*other folder/a\.py"):
        check_code(tmp_path, ["other folder/a.py:b"], named=["a.py:b", "folder/a.py:b"])


def test_completion_is_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    """`source <(dmoe completion bash)`."""
    with pytest.raises(SystemExit) as exit_:
        main(["completion", "bash"])
    assert not exit_.value.code
    assert "complete -F" in capsys.readouterr().out


JOIN = ["--join", "127.0.0.1:1"]


def train(given: Given) -> TrainCommand:
    return parse_command_line(TrainCommand, prog="dmoe train", args=given.words)


def test_what_is_typed_goes_before_the_environment_and_that_before_a_file(tmp_path: Path) -> None:
    """A file's tables are of no account. DMOE_DATA is a folder and no flag."""
    file = tmp_path / "run.toml"
    file.write_text(
        'steps = 7\nk_best = 2\naverage_by_samples = false\n[model]\ngrid_size = [2, 2]\nrouter = "switch"\nseed = 4\n'
    )
    environ = {"DMOE_STEPS": "9", "DMOE_K_BEST": "3", "DMOE_GRID_SIZE": "2 3", "DMOE_DATA": "/data", "DMOE_SEED": ""}
    typed = [*JOIN, "--config", str(file), "--k_best=1", "--router", "hash"]
    command = train(gather(TrainCommand, typed, environ, name="train"))
    assert (command.calls.k_best, command.language.router) == (1, "hash")
    assert (command.run_length.steps, command.language.grid_size) == (9, (2, 3))
    assert (command.averaging.average_by_samples, command.data.seed, command.data.data) == (False, 4, "auto")
    by_variable = gather(TrainCommand, JOIN, {"DMOE_CONFIG": str(file)}, name="train")
    assert train(by_variable).run_length.steps == 7


@pytest.mark.parametrize(("answer", "saves"), [("no", False), ("0", False), ("True", True)])
def test_a_switch_has_a_word_for_an_answer(answer: str, saves: bool) -> None:
    """A word answers yes or no; an answer that is the default adds no flag."""
    given = gather(UpCommand, [], {"DMOE_SAVE_EXPERTS": answer}, name="up")
    assert parse_command_line(UpCommand, prog="dmoe up", args=given.words).swarm.save_experts is saves


def test_a_runs_own_config_is_such_a_file(tmp_path: Path) -> None:
    """All that was not as by default, but for whom the run joined; infinity, which JSON lacks, too."""
    kept: dict[str, Any] = {"d_model": 64, "grid_size": (2, 3), "grad_clip": "inf", "route": "token"}
    options = parsed(TrainCommand, join=("far:1",), json=True, **kept)
    (tmp_path / "config.json").write_text(json.dumps({"settings": plain(options.settings())}))
    given = gather(TrainCommand, [*JOIN, "--config", str(tmp_path / "config.json")], {}, name="train")
    command = train(given)
    assert (command.join, command.report.json) == (("127.0.0.1:1",), False)
    assert (command.language, command.trunk) == (options.language, options.trunk)
    command.check()


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("stepz = 3", "run.toml: dmoe train has no setting stepz; did you mean steps?"),
        ("steps = true", "run.toml: steps must have a value, got True"),
        ("steps = [1, 2]", "run.toml: steps must be one value, got [1, 2]"),
        ('steps = "x"', "run.toml: steps: Error parsing --steps"),
        ("json = 3", "run.toml: json must be true or false, got 3"),
        ("k_min = 9", "run.toml: k_min: --k-min must not exceed --k-best, got 9 and 4"),
        ("steps =", "run.toml is no file of flags: Invalid value"),
        (None, "cannot read run.toml: No such file or directory"),
        ({"DMOE_STEPS": "many"}, "DMOE_STEPS: Error parsing --steps"),
        ({"DMOE_K_MIN": "9"}, "DMOE_K_MIN: --k-min must not exceed --k-best"),
        ({"DMOE_JSON": "maybe"}, "DMOE_JSON must be true or false, got 'maybe'"),
    ],
)
def test_a_source_that_will_not_do_gets_one_line(
    source: Any, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the file and the key, or the variable."""
    monkeypatch.chdir(tmp_path)
    for name, value in source.items() if isinstance(source, dict) else ():
        monkeypatch.setenv(name, value)
    if isinstance(source, str):
        Path("run.toml").write_text(source)
    config = [] if isinstance(source, dict) else ["--config", "run.toml"]
    check_one_line(["train", *JOIN, *config], 2, f".*{re.escape(line)}", capsys)


def test_a_file_runs_no_code_by_itself(tmp_path: Path) -> None:
    """Code that a file names runs only if the user names it too, where variables count as well, or trusts the file."""
    file = tmp_path / "run.toml"
    file.write_text('model = "mine.py:model"')

    def given(*more: str, **environ: str) -> Any:
        return gather(TrainCommand, [*JOIN, "--config", str(file), *more], environ, name="train")

    with pytest.raises(ValueError, match=r"out of .*mine\.py, .*name mine\.py:model again, or give --trust-run"):
        given().check_code(is_trusted=False, can_trust=True)
    with pytest.raises(ValueError, match=r"name mine\.py:model again$"):
        given().check_code(is_trusted=False, can_trust=False)
    given().check_code(is_trusted=True, can_trust=True)
    given("--model", "mine.py:model").check_code(is_trusted=False, can_trust=True)
    given(DMOE_MODEL="other.py:model").check_code(is_trusted=False, can_trust=True)
