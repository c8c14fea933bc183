"""RUN/inspection: the pictures, and a report.md with a sentence on each."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dmoe_jax.data.corpora import Corpus
from dmoe_jax.inspection.pictures import panels, shown_layers, words_picture
from dmoe_jax.inspection.reading import Reading
from dmoe_jax.inspection.statistics import APART_ERRORS, load_over_training, turnover
from dmoe_jax.inspection.word_classes import article_starts
from dmoe_jax.runs.report import markdown_table
from dmoe_jax.runs.run_folder import REPORT, RunFolder, plain, replaced_file
from dmoe_jax.trained.saved_model import SavedModel
from dmoe_jax.trained.saved_run import SavedRun

_ON_WORDS = (
    "How often the experts (rows) are chosen for what has such words and such a place in its article (columns), "
    "relative to how often they are chosen for all; a number stands where this is told apart from 1, by "
    f"{APART_ERRORS:g} standard errors over the places that were read."
)

_NAME = "words_"
"""Beginning of the pictures' names, which end with the layer's."""


def write_inspection(
    run: SavedRun, model: SavedModel, reading: Reading, corpus: Corpus, *, split: str
) -> dict[str, Any]:
    """Draw the findings of a reading of a run's text into its folder, with a report; return them as JSON can say them.
    Raises OSError if the folder cannot be written."""
    folder = run.inspection
    folder.mkdir(exist_ok=True)
    figures: dict[str, Any] = {
        "run": str(run.path),
        "step": model.step,
        "router": model.router.name,
        "text": f"{corpus.name}, {split}",
        "words": int((reading.words >= 0).sum()),
        "samples": int((reading.words[..., 0] >= 0).sum()),
        "routed": "words" if reading.routes_words else "segments",
        "experts": reading.experts,
        "layers": {},
        "load": {
            layer: turnover(shares)
            for layer, shares in load_over_training(RunFolder(run.path).metrics()).items()
            if shares.shape[1] == model.num_experts
        },
        "left_out": [],
    }
    if not figures["load"]:
        figures["left_out"].append("the load over the training: the run has no records of it (kind `balance`)")
    drawn = _words(figures, model, reading, corpus, split)
    figures["pictures"] = list(drawn)
    for name, figure in drawn.items():
        with replaced_file(folder / name) as temporary:
            figure.savefig(temporary)
    for old in folder.glob(f"{_NAME}*.png"):
        if old.name not in drawn:
            old.unlink()  # of an inspection that saw more
    figures = plain(figures)
    with replaced_file(folder / REPORT) as temporary:
        temporary.write_text(_report(figures, drawn, run), encoding="utf-8")
    return figures


def _words(
    figures: dict[str, Any], model: SavedModel, reading: Reading, corpus: Corpus, split: str
) -> dict[str, Figure]:
    """Pictures of the layers by their file names; notes their figures, and what is left out."""
    vocabulary = corpus.vocabulary
    starts = article_starts(getattr(corpus, split), vocabulary)
    if not starts.size:
        figures["left_out"].append("the place in the article: the text has no headings in WikiText's form, `= Title =`")
    drawn = {}
    for layer, chosen in enumerate(reading.chosen):
        name, calls = model.layers[layer], np.bincount(chosen[chosen >= 0], minlength=model.num_experts)
        shares = calls / max(1, calls.sum())
        found = panels(reading, layer, num_experts=model.num_experts, vocabulary=vocabulary, article_starts=starts)
        figures["layers"][name] = {
            "shares": dict(zip(model.places, shares.tolist(), strict=True)),
            "told_apart": {panel.title: int(panel.lift.is_apart.sum()) for panel in found},
        }
        if layer in shown_layers(len(reading.chosen)):
            drawn[f"{_NAME}{name}.png"] = words_picture(name, found, model.places, shares)
    if missing := model.layers[len(reading.chosen) :]:
        names = missing[0] if len(missing) == 1 else f"{missing[0]} to {missing[-1]}"
        figures["left_out"].append(
            f"the choices in {names}, which depend on what earlier experts return: the run folder has no experts, "
            "they live on their nodes: --experts names the folders in which those saved them, --join asks a swarm that "
            "is alive"
        )
    return drawn


def _report(figures: Mapping[str, Any], drawn: Mapping[str, Figure], run: SavedRun) -> str:
    read = (
        f"The model of step {figures['step']:,} of `{run.path}` (router {figures['router']}) read "
        f"{figures['words']:,} words of {figures['text']} from evenly spaced places, and routed "
        f"{figures['samples']:,} {figures['routed']}; nothing was trained. "
        f"The experts that could be chosen: {figures['experts']}."
    )
    if not run.is_complete:
        read += " The run is unfinished."
    parts = ["# What the router learnt", read]
    for name, figure in drawn.items():
        title = figure.get_suptitle()
        parts.append(f"## {title}\n\n![{title}]({name})\n\n{_ON_WORDS}")
    if figures["load"]:
        rows = [(layer, *each.values()) for layer, each in figures["load"].items()]
        head = ("layer", "windows", "experts in use at the end", "came into use", "fell idle")
        text = "An expert with less than a tenth of an even share of its layer's load in a window is idle."
        parts += ["## Who did the work while it was learnt", text, markdown_table(head, rows)]
    if figures["left_out"]:
        parts += ["## Left out", "\n".join(f"- {text}." for text in figures["left_out"])]
    return "\n\n".join(parts) + "\n"
