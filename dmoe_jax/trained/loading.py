"""The way from a run folder, or an export, to a trained model."""

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import Int32

from dmoe_jax.data.corpora import Corpus, load_corpus
from dmoe_jax.data.pieces import AnyVocabulary
from dmoe_jax.data.saved_vocabulary import VOCABULARY, load_vocabulary
from dmoe_jax.directory.grid import layer_prefix
from dmoe_jax.trained.export_files import is_export, vocabulary_folder
from dmoe_jax.trained.imported import read_export
from dmoe_jax.trained.language_model import TrainedModel
from dmoe_jax.trained.offered import fetch_model
from dmoe_jax.trained.remote import local_copy
from dmoe_jax.trained.saved_model import Checkpoint, load_model, open_corpus
from dmoe_jax.trained.saved_run import find_run
from dmoe_jax.training.prepared_run import check_code, check_meaning_of_run, is_code

logger = logging.getLogger(__name__)

SPLITS = ("train", "valid", "test")
"""Parts of a text."""


def load_run(
    path: str | Path | None = None,
    *,
    experts: Sequence[str | Path] = (),
    checkpoint: Checkpoint = "last",
    data: str | None = None,
    router: str | None = None,
    trust_run: bool = False,
    swarm: Any = None,
) -> TrainedModel:
    """Load the Transformer-XL of a run, finished or not, of an export, or of a swarm that trains it.

    Args:
      path: folder of `dmoe train`, `dmoe demo`, `dmoe up` or `experiments.transformer_xl`; or a file or folder of
        `dmoe export`; also at a URL, gs:// or s3://. None: the model of the swarm's trainers, as far as they have come.
      experts: folders in which nodes saved the run's experts; none: those that lie beside the run.
      checkpoint: "last", "best" (of the least loss in an evaluation on the way), or the step of one that is there. The
        experts of a swarm are as their nodes saved them last.
      data: the text that it was trained on; None: as the run had it.
      router: the model's router again, FILE.py:NAME, if it is out of a file: none is run because a folder names it.
      trust_run: run the Python file that the folder names.
      swarm: a `BlockingSwarm`, whose experts answer in place of those that were saved; see `TrainedModel.on`.

    Raises:
      ValueError: there is no such run or checkpoint, or its words or its code cannot be had.
      OSError: it cannot be read. NetError: no trainer of the swarm gives its model.
    """
    if path is None:
        if swarm is None:
            raise ValueError("expected the folder of a run, or a swarm")
        model: TrainedModel = swarm.run(partial(fetch_run, swarm.swarm, data=data, router=router))
    else:
        model = load_folder(Path(path), [*map(Path, experts)], checkpoint, data, router, trust_run)
    lost = [layer_prefix(number) for number, known in enumerate(model.known) if not known.any()]
    if path is not None and swarm is None and lost:
        what = f"{path} has no experts of {', '.join(lost)}"
        logger.warning("%s: give experts= with the folders in which nodes saved them, or use model.on(swarm)", what)
    return model if swarm is None else cast(TrainedModel, model.on(swarm))


def load_folder(
    path: Path,
    experts: Sequence[Path] = (),
    checkpoint: Checkpoint = "last",
    data: str | None = None,
    router: str | None = None,
    trust_run: bool = False,
) -> TrainedModel:
    """Load what is at a path, which may lack experts: see `load_run`."""
    with ExitStack() as stack:
        found = stack.enter_context(local_copy(path))
        folders = [stack.enter_context(local_copy(folder)) for folder in experts]
        if is_export(found):
            if folders or checkpoint != "last":
                raise ValueError(f"experts and a checkpoint would have no effect: {path} is an export")
            vocabulary = load_vocabulary(vocabulary_folder(found))
            saved, num_words = read_export(found, router=router, trust=trust_run), len(vocabulary)
            if saved.config.vocab_size != num_words:
                raise ValueError(f"{path} has {saved.config.vocab_size} words, the vocabulary beside it {num_words}")
            return TrainedModel(saved, vocabulary, text_in(vocabulary, data, f"the export {path}"), name=str(path))
        run = find_run(found, data=data, unfinished=True)
        if router is not None and not is_code(run.router):
            raise ValueError(f"router {router!r} would have no effect: that of the run is {run.router!r}")
        run = replace(run, router=router or run.router)
        if not trust_run:
            check_code(run.path, [run.router], named=[router or ""], otherwise=", or trust the run")
        text = functools.cache(lambda: open_corpus(run))
        has_words = (run.path / VOCABULARY).exists()  # those of earlier versions have none
        vocabulary = load_vocabulary(run.path) if has_words else text().vocabulary
        check_meaning_of_run(run.path, vocabulary.meaning)
        saved = load_model(run, len(vocabulary), folders, checkpoint)
        return TrainedModel(saved, vocabulary, _splits(text), name=str(path))


async def fetch_run(swarm: Any, *, data: str | None = None, router: str | None = None) -> TrainedModel:
    """The model that trainers of a swarm train, as far as they have come; for its experts take `TrainedModel.on`.

    Args:
      swarm: a `Swarm`.
      data: the text that it was trained on, for `TrainedModel.split`.
      router: the model's router, FILE.py:NAME, if it is out of a file.

    Raises:
      NoModelOffered: no trainer gives its model. ValueError: its router is out of a file, which would have to be named.
    """
    saved, vocabulary = await fetch_model(swarm.peer, swarm.name, router=router)
    name = f"swarm {swarm.name!r}"
    return TrainedModel(saved, vocabulary, text_in(vocabulary, data, name), name=f"of {name}")


def text_in(vocabulary: AnyVocabulary, data: str | None, what: str) -> Callable[[str], Int32[np.ndarray, " tokens"]]:
    """Parts of the text of a source, in a vocabulary; without a source they are an error, which names `what`."""

    @functools.cache
    def text() -> Corpus:
        if data is None:
            raise ValueError(f"{what} does not say where its text is: name it with data=, or give a text")
        return load_corpus(source=data, vocabulary=vocabulary)

    return _splits(text)


def _splits(text: Callable[[], Corpus]) -> Callable[[str], Int32[np.ndarray, " tokens"]]:
    def split(name: str) -> Int32[np.ndarray, " tokens"]:
        if name not in SPLITS:
            raise ValueError(f"expected one of {', '.join(SPLITS)}, got {name!r}")
        ids: np.ndarray = getattr(text(), name)
        return ids

    return split
