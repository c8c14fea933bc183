"""The way from a run folder to a trained model."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from dmoe_jax.trained.language_model import TrainedModel
from dmoe_jax.trained.saved_model import load_model, open_corpus
from dmoe_jax.trained.saved_run import find_run
from dmoe_jax.training.prepared_run import check_code

SPLITS = ("train", "valid", "test")
"""Parts of a text."""


def load_run(
    path: str | Path,
    *,
    experts: Sequence[str | Path] = (),
    data: str | None = None,
    router: str | None = None,
    trust_run: bool = False,
) -> TrainedModel:
    """Load the Transformer-XL of a run, finished or not, from its last checkpoint.

    Args:
      path: folder of `dmoe train`, `dmoe demo`, `dmoe up` or `experiments.transformer_xl`.
      experts: folders in which nodes saved its experts; none: those that lie beside the run.
      data: the text that it was trained on; None: as the run had it.
      router: the run's router again, FILE.py:NAME, if it is out of a file: no file is run because a run names it.
      trust_run: run the Python file that the run names.

    Raises:
      ValueError: there is no such run, or its text or its code cannot be had.
      CheckpointError: there is no checkpoint that can be read.
    """
    run = replace(found := find_run(Path(path), data=data, unfinished=True), router=router or found.router)
    if not trust_run:
        check_code(run.path, [run.router], named=[router or ""], otherwise=", or trust the run")
    corpus = functools.cache(lambda: open_corpus(run))
    vocabulary = corpus().vocabulary
    saved = load_model(run, len(vocabulary), [Path(folder) for folder in experts])

    def split(name: str) -> Int32[np.ndarray, " tokens"]:
        if name not in SPLITS:
            raise ValueError(f"expected one of {', '.join(SPLITS)}, got {name!r}")
        ids: np.ndarray = getattr(corpus(), name)
        return ids

    return TrainedModel(saved, vocabulary, split)
