"""The figures behind `dmoe inspect` against cases made by hand, its pictures, and what it refuses."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmoe_jax.cli.train_options import TrainOptions
from dmoe_jax.data.vocabulary import Vocabulary
from dmoe_jax.data.words import EOS, UNK
from dmoe_jax.inspection import pictures
from dmoe_jax.inspection.pictures import Panel
from dmoe_jax.inspection.statistics import lift, load_over_training, one_hot, turnover
from dmoe_jax.inspection.word_classes import Classes, article_starts, kinds, places_in_article, present
from dmoe_jax.runs.run_folder import RunFolder
from tests.dmoe_jax.figure_texts import assert_readable, words_of
from tests.dmoe_jax.training_rig import outcome


def test_lift_is_the_ratio_of_the_shares() -> None:
    """Expert 0 has 3 of 4 calls, and all 2 of class 0: 1 / (3/4). Expert 1 has 1 of 4 and none of class 0."""
    members = one_hot(np.array([[0, 0], [0, 1]]), 2)
    classes = one_hot(np.array([[0, 1], [0, 1]]), 2)
    found = lift(members, classes)
    np.testing.assert_allclose(found.value, [[4 / 3, 2 / 3], [0, 2]])
    assert not found.is_apart.any()  # four samples tell nothing


def test_a_sample_may_have_several_experts_and_words() -> None:
    """Sample 0 goes to both experts, sample 1 to the second alone; they have 3 and 1 words of class 0, 1 and 3 of the
    other. Pairs of a call and a word: expert 0 has (3, 1), expert 1 (4, 4) of 12. 3 * 12 / (4 * 7) = 9 / 7."""
    found = lift(np.array([[[1, 1], [0, 1]]]), np.array([[[3, 1], [1, 3]]]))
    np.testing.assert_allclose(found.value, [[9 / 7, 3 / 5], [6 / 7, 6 / 5]])


def test_only_what_is_no_chance_is_told_apart() -> None:
    """An expert that takes nearly all of one class in 640 samples stands apart; one that is independent does not."""
    rng = np.random.default_rng(0)
    classes, independent = rng.integers(0, 2, (2, 16, 40))
    skewed = np.where(rng.random((16, 40)) < 0.95, classes, 1 - classes)
    assert lift(one_hot(skewed, 2), one_hot(classes, 2)).is_apart.all()
    assert not lift(one_hot(independent, 2), one_hot(classes, 2)).is_apart.any()


def test_the_error_is_that_of_independent_choices_where_they_are() -> None:
    """By the toss of a coin with p = 1/2 a class of n samples out of 2 n has a lift of standard error sqrt(1 / (2 n)):
    the share of n tosses has sqrt(1 / (4 n)), which counts twice, and half of it is in the overall share."""
    rng = np.random.default_rng(1)
    classes = np.tile(np.arange(2), (32, 50))
    found = lift(one_hot(rng.integers(0, 2, (32, 100)), 2), one_hot(classes, 2))
    np.testing.assert_allclose(found.error, math.sqrt(1 / 3200), rtol=0.5)


def test_blocks_that_are_alike_inside_count_once() -> None:
    """Half of the blocks choose expert 0 and have class 0 by chance: samples are many, but places are four."""
    members, classes = (one_hot(np.tile(np.array(block)[:, None], 100), 2) for block in ([0, 0, 1, 1], [0, 1, 1, 1]))
    found = lift(members, classes)
    np.testing.assert_allclose(found.value[0, 0], 2)
    assert not found.is_apart.any()


def test_births_and_deaths_are_changes_of_use() -> None:
    """With two experts an even share is 1/2 and a tenth of it 1/20."""
    found = turnover(np.array([[1.0, 0.0], [0.97, 0.03], [0.5, 0.5], [0.0, 1.0]]))
    assert found == {"windows": 4, "in_use_at_the_end": 1, "born": 1, "died": 1}


def test_words_have_a_kind() -> None:
    """By letters alone, but for the frequent lower-case ones."""
    frequent = {"the": "frequent word (of 100)", EOS: "end of line", UNK: UNK, "=": "heading sign =", "3rd": "number"}
    frequent |= {"@-@": "punctuation", "London": "Capitalised"}
    rare = {"walking": "word in -ing", "sing": "other word", "walked": "word in -ed", "cats": "word in -s"}
    vocabulary = Vocabulary((*frequent, *(f"X{index}" for index in range(100)), *rare))
    found = kinds(vocabulary)
    numbers = vocabulary.encode([*frequent, *rare])
    assert [found.names[kind] for kind in found.of[numbers]] == [*frequent.values(), *rare.values()]


def test_pieces_have_the_kinds_of_their_letters() -> None:
    """The sign of a space before them is no letter, unless it is all there is."""
    vocabulary = Vocabulary(("Ġthe", "▁walk", "ĠLondon", "Ġ,", "▁"))
    found = kinds(vocabulary)
    kinds_of = ["frequent word (of 100)", "frequent word (of 100)", "Capitalised", "punctuation", "punctuation"]
    assert [found.names[kind] for kind in found.of] == kinds_of


def test_articles_begin_at_their_titles() -> None:
    """`= Title =` opens an article, `= = Section = =` and a lone sign do not."""
    text = f"{EOS} = A b = {EOS} {EOS} = = c = = {EOS} x = y {EOS} = d = {EOS} z {EOS}".split()
    vocabulary = Vocabulary.build(text)
    starts = article_starts(vocabulary.encode(text), vocabulary)
    assert [text[start : start + 3] for start in starts] == [["=", "A", "b"], ["=", "d", "="]]
    assert not article_starts(np.array([0, 1, 0]), Vocabulary(("a", "b"))).size


def test_places_are_counted_in_segments_from_the_title() -> None:
    """With articles at 3 and 20, and segments of 4 words, 3..6 is the first, 7 the second, 11 the third."""
    found = places_in_article(np.array([0, 3, 6, 7, 11, 20]), np.array([3, 20]), 4)
    places = [found.names[number].removeprefix("segment ") for number in found.of if number >= 0]
    assert (found.of[0], places) == (-1, ["1", "1", "2", "3–4", "1"])
    kept = present(Classes(found.names, np.array([-1, 2, 0])))
    assert kept.names == ("segment 1", "segment 3–4")
    np.testing.assert_array_equal(kept.of, [-1, 1, 0])


def test_load_comes_from_the_balance_records() -> None:
    """Shares of each window; one without any sample is left out, and of two for a step the last counts."""
    windows = (10, 5, [1, 1]), (9, 5, [9, 9]), (9, 5, [1, 3]), (9, 7, [0, 0]), (9, 9, [2, 0])
    records: list[dict[str, Any]] = [
        {"kind": "balance", "layer": f"layer{layer}", "step": step, "histogram": histogram}
        for layer, step, histogram in windows
    ]
    found = load_over_training([*records, {"kind": "train", "step": 9}])
    assert list(found) == ["layer9", "layer10"]
    np.testing.assert_allclose(found["layer9"], [[0.25, 0.75], [1, 0]])


def made_up_panels(num_experts: int) -> list[Panel]:
    """Three panels of experts that prefer some classes."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, num_experts, (16, 600))
    members = one_hot(first, num_experts)

    def panel(title: str, names: tuple[str, ...]) -> Panel:
        classes = np.where(rng.random(first.shape) < 0.5, first % len(names), rng.integers(0, len(names), first.shape))
        return Panel(title, names, lift(members, one_hot(classes, len(names))))

    words = kinds(Vocabulary(("a",))).names
    places = tuple(f"segment {number}" for number in ("1", "2", "3–4", "5–8", "9–16", "17+"))
    return [panel("words of the segment", words), panel("first word", words), panel("place", places)]


@pytest.mark.parametrize("num_experts", [4, 64])
def test_a_picture_is_readable(num_experts: int) -> None:
    """No text overlaps another or leaves the picture, with few experts and with more than are named."""
    side = math.isqrt(num_experts)
    places = [f"{row}.{column}" for row in range(side) for column in range(side)]
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(num_experts))
    words = pictures.words_picture("layer0", made_up_panels(num_experts), places, shares)
    assert_readable(words)
    assert "layer0: which experts are chosen for what" in {text.partition(" (")[0] for text in words_of(words)}


TRAIN = TrainOptions(join=()).settings()
DENSE = {"model": "small", "corpus": "wikitext-2", "config": {"grid_size": [], "num_layers": 2}}


@pytest.mark.parametrize(
    ("settings", "has_checkpoint", "line"),
    [
        (None, False, "is no run folder: it has no readable config.json"),
        ({"experiment": "transformer_xl"}, False, "is the folder of an experiment, not of one run"),
        ({"trials": 3}, False, "is no run of a language model"),
        (DENSE, True, "is a run of a dense model, 'small': it has no experts"),
        (TRAIN | {"model": "mine.py:make"}, True, "is a run of a model of your own, mine.py:make"),
        (TRAIN, False, "there is no checkpoint in .*checkpoints"),
        (TRAIN, True, "is unfinished, at step 7; --unfinished inspects"),
    ],
)
def test_what_cannot_be_inspected_is_refused(
    settings: dict[str, Any] | None, has_checkpoint: bool, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says why, and nothing is written."""
    if settings is not None:
        RunFolder.create(tmp_path / "run", settings).log("train", step=7)
    else:
        (tmp_path / "run").mkdir()
    if has_checkpoint:
        (tmp_path / "run" / "checkpoints" / "7").mkdir(parents=True)
    status, error = outcome(["inspect", str(tmp_path / "run")], capsys)
    assert (status, len(error.splitlines())) == (2, 1)
    assert re.search(line, error)
    assert not (tmp_path / "run" / "inspection").exists()


def test_a_run_folder_runs_no_code_by_itself(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """The router's file must be named again, or the folder trusted; a router of ours is no file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise ValueError('it ran')\n")
    for name, router in (("run", "mine.py:router"), ("ours", "switch")):
        settings = TRAIN | {"language": TRAIN["language"] | {"router": router}, "data": {"data": "embedded"}}
        RunFolder.create(tmp_path / name, settings).log("train", step=7)
        (tmp_path / name / "checkpoints" / "7").mkdir(parents=True)

    def refusal(*words: str) -> str:
        return outcome(["inspect", "--unfinished", *words], capsys)[1]

    line = f"would run code out of {tmp_path / 'mine.py'}, .*name mine.py:router again, or give --trust-run"
    assert re.search(line, refusal("run"))
    for words in (("--router", "mine.py:router"), ("--trust-run",)):
        assert "raised ValueError: it ran" in refusal("run", *words)
    assert "--router would have no effect: that of the run is switch" in refusal("ours", "--router", "mine.py:router")


def test_the_runs_of_an_experiment_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the runs that the folder above holds; for a path without a run, it says that there is none."""
    RunFolder.create(tmp_path / "all", {"experiment": "transformer_xl"})
    (tmp_path / "all" / "dmoe" / "seed0" / "checkpoints").mkdir(parents=True)
    for name, line in (("all", "it holds 1 runs: .*all/dmoe/seed0"), ("x", "there is no run folder")):
        assert re.search(line, outcome(["inspect", str(tmp_path / name)], capsys)[1])
