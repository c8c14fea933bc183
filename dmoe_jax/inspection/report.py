"""RUN/inspection: the pictures, and a report.md with a sentence on each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dmoe_jax.data.corpora import Corpus
from dmoe_jax.inspection import analysis, pictures
from dmoe_jax.inspection.reading import Reading
from dmoe_jax.inspection.saved_model import SavedModel
from dmoe_jax.inspection.saved_run import SavedRun
from dmoe_jax.inspection.statistics import APART_ERRORS, turnover
from dmoe_jax.inspection.word_classes import article_starts
from dmoe_jax.runs.report import markdown_table
from dmoe_jax.runs.run_folder import REPORT, plain, replaced_file

_NAMES = ("words_layer", "load.", "layers.", "similarity.")
"""How the names of the pictures begin."""

_MAX_PAIRS = 3
"""Pairs of neighbouring layers that are drawn expert by expert: those that agree most."""

_ELSEWHERE = (
    "the run folder has no experts, they live on their nodes: --experts names the folders in which those saved them, "
    "--join asks a swarm that is alive"
)


@dataclass(slots=True, kw_only=True)
class _Inspection:
    """What has been drawn and found so far."""

    folder: Path
    model: SavedModel
    parts: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    pictures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def show(self, name: str, figure: Figure, text: str) -> None:
        """A picture and the paragraph on it."""
        title = figure.get_suptitle()
        with replaced_file(self.folder / name) as temporary:
            figure.savefig(temporary)
        self.pictures.append(name)
        self.parts.append(f"## {title}\n\n![{title}]({name})\n\n{text}")


def write_inspection(
    run: SavedRun, model: SavedModel, reading: Reading, corpus: Corpus, *, split: str
) -> dict[str, Any]:
    """Draw what was found in a run into its folder, with a report.

    Args:
      run, model, corpus: the run, its model and its text.
      reading: what the model chose while it read.
      split: which part of the text that was.

    Returns: the figures, as JSON can hold them.

    Raises:
      OSError: the folder cannot be written.
    """
    folder = run.inspection
    folder.mkdir(exist_ok=True)
    made = _Inspection(folder=folder, model=model)
    num_words = int((reading.words >= 0).sum())
    made.figures = {
        "run": str(run.path),
        "step": model.step,
        "router": model.router.name,
        "text": f"{corpus.name}, {split}",
        "words": num_words,
        "samples": int((reading.words[..., 0] >= 0).sum()),
        "routed": "words" if reading.routes_words else "segments",
    }
    made.figures["experts"] = _who_there_is(model, reading)
    _show_words(made, reading, corpus, getattr(corpus, split))
    _show_load(made, run.metrics())
    _show_agreement(made, reading)
    _show_likeness(made, reading)
    for old in folder.glob("*.png"):
        if old.name not in made.pictures and old.name.startswith(_NAMES):
            old.unlink()  # of an inspection that saw more
    made.figures = plain({**made.figures, "pictures": made.pictures, "left_out": made.left_out})
    with replaced_file(folder / REPORT) as temporary:
        temporary.write_text(_report(made, run), encoding="utf-8")
    return made.figures


def _show_words(made: _Inspection, reading: Reading, corpus: Corpus, ids: np.ndarray) -> None:
    model, vocabulary, starts = made.model, corpus.vocabulary, article_starts(ids, corpus.vocabulary)
    if not starts.size:
        made.left_out.append("the place in the article: the text has no headings in WikiText's form, `= Title =`")
    layers: dict[str, Any] = {}
    for layer, chosen in enumerate(reading.chosen):
        name, shares = model.layers[layer], analysis.call_shares(chosen, model.num_experts)
        found = analysis.panels(
            reading, layer, num_experts=model.num_experts, vocabulary=vocabulary, article_starts=starts
        )
        strongest = {panel.title: analysis.strongest(panel, model.places) for panel in found}
        layers[name] = {
            "shares": dict(zip(model.places, shares.tolist(), strict=True)),
            "told_apart": {panel.title: int(panel.lift.is_apart.sum()) for panel in found},
            "strongest": strongest,
            "explained": analysis.explained(reading, layer, vocabulary=vocabulary, article_starts=starts),
        }
        if layer in pictures.shown_layers(len(reading.chosen)):
            figure = pictures.words_picture(name, found, model.places, shares)
            made.show(f"words_{name}.png", figure, _sentence_on_words(strongest, layers[name]["explained"]))
    made.figures["layers"] = layers
    if missing := model.layers[len(reading.chosen) :]:
        names = missing[0] if len(missing) == 1 else f"{missing[0]} to {missing[-1]}"
        made.left_out.append(f"the choices in {names}, which depend on what earlier experts return: {_ELSEWHERE}")


def _sentence_on_words(strongest: Mapping[str, Sequence[Mapping[str, Any]]], explained: Mapping[str, float]) -> str:
    text = (
        "How often the experts (rows) are chosen for what has such words and such a place in its article (columns), "
        "relative to how often they are chosen for all; a number stands where this "
        f"is told apart from 1, by {APART_ERRORS:g} standard errors over the places that were read."
    )
    cells = [(title, cell) for title, found in strongest.items() for cell in found[:1]]
    furthest = [
        f"{cell['expert']} for “{cell['class']}” ({title}), {cell['lift']:.2g} ± {cell['error']:.1g} times"
        for title, cell in cells
    ]
    text += f" Furthest from 1: {'; '.join(furthest)}." if furthest else " No expert is told apart from the others."
    tells = [f"the {name.replace('_', ' ')} {value:.2f}" for name, value in explained.items() if np.isfinite(value)]
    if not tells:
        return f"{text} The expert of the highest weight is always the same."
    return f"{text} What tells which expert has the highest weight (0: nothing, 1: all): {', '.join(tells)}."


def _show_load(made: _Inspection, metrics: Sequence[Mapping[str, Any]]) -> None:
    loads = [load for load in analysis.load_over_training(metrics) if load.shares.shape[1] == made.model.num_experts]
    if not loads:
        made.left_out.append("the load over the training: the run has no records of it (kind `balance`)")
        return
    kills = [record for record in metrics if record["kind"] == "event" and record.get("name") == "node_killed"]
    killed_at = [float(record["step"]) for record in kills if record.get("step") is not None]
    figure = pictures.load_picture(loads, made.model.places, killed_at=killed_at)
    found = {load.layer: turnover(load.shares) for load in loads}
    made.figures["load"] = {
        layer: {
            "windows": len(each.in_use),
            "in_use_at_the_end": int(each.in_use[-1].sum()),
            "born": int(each.born.sum()),
            "died": int(each.died.sum()),
        }
        for layer, each in found.items()
    }
    made.show(
        "load.png",
        figure,
        "Each expert's share of its layer's load in each window of the training (columns); a circle marks an expert "
        "that came into use, a cross one that fell below a tenth of an even share, and the shares of the last window "
        f"stand at the right{'; a node was lost at the vertical line' if killed_at else ''}.",
    )


def _show_agreement(made: _Inspection, reading: Reading) -> None:
    count, model = len(reading.chosen), made.model
    if count < 2:
        why = "the model has one layer" if model.config.num_layers == 1 else "only one layer's choices are known"
        made.left_out.append(f"agreement between layers: {why}")
        return
    agreement = analysis.agreement(reading)
    made.figures["agreement"] = {
        model.layers[row]: {model.layers[column]: agreement[row, column] for column in range(count) if column != row}
        for row in range(count)
    }
    strength = [np.nan_to_num(agreement[layer, layer + 1], nan=-1.0) for layer in range(count - 1)]
    chosen = sorted(np.argsort(-np.array(strength), kind="stable")[:_MAX_PAIRS].tolist())
    pairs = [
        (layer, layer + 1, analysis.pairs_of_layers(reading, layer, layer + 1, model.num_experts)) for layer in chosen
    ]
    made.show(
        "layers.png",
        pictures.layers_picture(model.layers[:count], agreement, pairs, model.places),
        "Left: which share of the uncertainty about a layer's first choice (row) is gone once that of another layer "
        "(column) is known for the same sample, corrected for what samples of other places tell; 0: nothing, 1: all, "
        "a dash: a layer that always chooses the same one. Right: how often two experts of neighbouring layers are "
        "chosen for the same sample, relative to chance.",
    )


def _show_likeness(made: _Inspection, reading: Reading) -> None:
    model = made.model
    found: list[tuple[str, list[analysis.Likeness]]] = []
    for layer, name in enumerate(model.layers):
        rows = [("parameters", analysis.parameters(model, layer))] if model.experts else []
        rows += [("outputs", outputs) for outputs in reading.outputs[layer : layer + 1]]
        of_layer = [each for title, vectors in rows if (each := analysis.likeness(title, vectors)) is not None]
        if of_layer:
            found.append((name, of_layer))
    if not found:
        why = "there are no two of them" if model.experts else "the run folder has none"
        made.left_out.append(f"similarity of the experts: {why}")
        return
    if not model.experts:
        made.left_out.append("similarity of the experts' parameters: the swarm tells what experts return, no more")
    made.figures["similarity"] = {
        name: {
            each.title: {"experts": int(each.experts.size), "spread": each.spread, **_range_of(each.cosine)}
            for each in of_layer
        }
        for name, of_layer in found
    }
    made.show(
        "similarity.png",
        pictures.likeness_picture(found, model.places),
        "The cosine between any two experts of a layer, of their parameters and of what they return for the same "
        f"samples, after their mean is subtracted: unrelated experts have about {-1 / (model.num_experts - 1):.2f}. "
        "The spread is how far they are from their mean, relative to it: 0 for experts that are all the same.",
    )


def _who_there_is(model: SavedModel, reading: Reading) -> str:
    """Which experts a layer could choose from."""
    if not model.experts and reading.outputs:
        return "those of a swarm that is alive"
    if not model.experts or model.known.all():
        return "all, as if none had ever been lost"
    return f"the {int(model.known.sum())} of {model.known.size} that were saved"


def _range_of(cosine: np.ndarray) -> dict[str, float]:
    """The least and the largest cosine of two experts; NaN if all are the same."""
    off = cosine[~np.eye(len(cosine), dtype=bool) & np.isfinite(cosine)]
    least, largest = (off.min(), off.max()) if off.size else (np.nan, np.nan)
    return {"least_cosine": float(least), "largest_cosine": float(largest)}


def _report(made: _Inspection, run: SavedRun) -> str:
    figures = made.figures
    read = (
        f"The model of step {figures['step']:,} of `{run.path}` (router {figures['router']}) read "
        f"{figures['words']:,} words of {figures['text']} from evenly spaced places, and routed "
        f"{figures['samples']:,} {figures['routed']}; nothing was trained. "
        f"The experts that could be chosen: {figures['experts']}."
    )
    if not run.is_complete:
        read += " The run is unfinished."
    rows: list[tuple[str, object]] = []
    for layer, each in figures["layers"].items():
        rows += [(f"{layer}: told by the {name.replace('_', ' ')}", value) for name, value in each["explained"].items()]
    for layer, each in figures.get("load", {}).items():
        rows += [(f"{layer}: {name.replace('_', ' ')}", value) for name, value in each.items()]
    for layer, each in figures.get("similarity", {}).items():
        rows += [(f"{layer}: spread of {title}", value["spread"]) for title, value in each.items()]
    parts = ["# What the router learnt", read, *made.parts, "## Figures", markdown_table(("figure", "value"), rows)]
    if made.left_out:
        parts += ["## Left out", "\n".join(f"- {text}." for text in made.left_out)]
    return "\n\n".join(parts) + "\n"
