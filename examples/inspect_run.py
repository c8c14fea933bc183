"""Pictures of your own of what a run's router learnt: whether layers agree, how alike experts are, how the load moved.

pip install 'dmoe_jax[plots]'              # Matplotlib
python examples/inspect_run.py RUN      # a folder that `dmoe inspect RUN` takes; draws RUN/inspection/more.png
"""

import sys
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

from dmoe_jax.inspection.reading import cut, read_locally
from dmoe_jax.inspection.statistics import load_over_training
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.trained.saved_model import load_model, open_corpus
from dmoe_jax.trained.saved_run import find_run


def information(left, right):
    """Mutual information of two choices of [blocks, samples], nats; samples that have no expert (-1) do not count."""
    table = np.zeros((left.max() + 1, right.max() + 1))
    counted = (left >= 0) & (right >= 0)
    np.add.at(table, (left[counted], right[counted]), 1 / counted.sum())
    used = table > 0
    return (table[used] * np.log(table[used] / np.outer(table.sum(1), table.sum(0))[used])).sum()


def told(left, right):
    """Share of the uncertainty about `left` that is gone once `right` is known: 0 nothing, 1 all.

    What samples tell of samples in other blocks, places of the text, is chance and subtracted.
    """
    by_chance = np.mean([information(left, np.roll(right, shift, axis=0)) for shift in range(1, len(right))])
    room = information(left, left) - by_chance
    return (information(left, right) - by_chance) / room if room > 1e-9 else np.nan


def likeness(experts, known):
    """Cosine of the parameters of any two experts of a layer after their mean is subtracted: unlike ones are near 0."""
    rows = np.concatenate([np.asarray(leaf).reshape(len(leaf), -1) for leaf in jax.tree.leaves(experts)], axis=1)[known]
    rows = rows - rows.mean(axis=0)
    norms = np.maximum(np.linalg.norm(rows, axis=1), 1e-30)
    return rows @ rows.T / np.outer(norms, norms)


def main(folder):
    run = find_run(folder)
    corpus = open_corpus(run)
    model = load_model(run, len(corpus.vocabulary))
    reading = read_locally(model, cut(corpus.valid, model.config.seq_len, 65_536))
    first = [chosen[..., 0] for chosen in reading.chosen]  # the expert that was chosen first, in each layer
    agreement = np.array([[told(left, right) for right in first] for left in first])
    print(f"what layers tell of each other:\n{agreement.round(2)}")

    pictures = {"share of a row's choice that a column tells": agreement}
    if model.known.any():
        for name, experts, known in zip(model.layers, model.experts, model.known, strict=True):
            pictures[f"{name}: how alike its experts are"] = likeness(experts, known.ravel())
    for layer, shares in load_over_training(RunFolder(folder).metrics()).items():
        pictures[f"{layer}: each expert's share, by window"] = shares.T
    figure = Figure(figsize=(6, 3.2 * len(pictures)), layout="constrained")
    for axes, (title, values) in zip(figure.subplots(len(pictures), squeeze=False).flat, pictures.items(), strict=True):
        figure.colorbar(axes.imshow(values, aspect="auto"), ax=axes)
        axes.set_title(title)
    run.inspection.mkdir(exist_ok=True)
    figure.savefig(run.inspection / "more.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
