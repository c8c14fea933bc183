"""Data of a run, as far as its metrics and its report are concerned."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dmoe_jax.data.corpora import Corpus
from dmoe_jax.data.files import DataError
from dmoe_jax.data.pieces import PieceVocabulary
from dmoe_jax.data.saved_vocabulary import save_vocabulary
from dmoe_jax.data.vocabulary import unigram_perplexity
from dmoe_jax.machine.disk import CheckpointError
from dmoe_jax.model import Evaluation


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model's data, and the figures of an evaluation of it."""

    name: str
    description: str = ""
    """One line for people."""
    unit: str = "samples"
    """Things that are counted: tokens, samples."""
    splits: tuple[str, ...] = ("valid",)
    """Parts that the end of a run evaluates: "valid", "test"; evaluations on the way read only the first."""
    main: str = "loss"
    """Name of the figure that the headline has even if there is none."""
    meaning: str = ""
    """Meaning of a checkpoint's numbers with this data, as `Model.meaning`: a run goes on with the same alone."""

    def figures(self, evaluation: Evaluation) -> Mapping[str, float]:
        """The figures of an evaluation, by name: its loss and the model's own metrics."""
        return {"loss": evaluation.loss, **evaluation.metrics}

    def baseline(self, evaluation: Evaluation | None) -> Mapping[str, float]:
        """Figures to compare with, of the data that was evaluated; before any evaluation, of all of it."""
        return {}

    def keep_in(self, folder: Path) -> None:
        """Write into a run's folder all that a user of the model needs of its data, unless it is there.

        Raises:
          CheckpointError: the folder has that of other data, or a damaged one. OSError: it cannot be written.
        """


@dataclass(frozen=True, kw_only=True)
class LanguageTask(Task):
    """A text: perplexities, beside those of the model that knows nothing but the words' frequencies."""

    unit: str = "tokens"
    main: str = "perplexity"
    corpus: Corpus

    def figures(self, evaluation: Evaluation) -> Mapping[str, float]:
        """The loss in nats per token, and its perplexity; of a tokenizer's pieces also the bits for each byte."""
        figures = {"loss": evaluation.loss, "perplexity": evaluation.perplexity, **evaluation.metrics}
        vocabulary, pieces = self.corpus.vocabulary, evaluation.targets
        if isinstance(vocabulary, PieceVocabulary) and (num_bytes := len(vocabulary.decode(pieces).encode())):
            figures["bits_per_byte"] = evaluation.loss * pieces.size / math.log(2) / num_bytes
        return figures

    def baseline(self, evaluation: Evaluation | None) -> Mapping[str, float]:
        """The unigram perplexity over the very words that were evaluated."""
        words = self.corpus.valid if evaluation is None or not evaluation.targets.size else evaluation.targets
        return {"unigram_perplexity": unigram_perplexity(self.corpus.train, words, len(self.corpus.vocabulary))}

    def keep_in(self, folder: Path) -> None:
        """Write the vocabulary, and its tokenizer if it has one: see `dmoe_jax.data.load_vocabulary`."""
        try:
            save_vocabulary(folder, self.corpus.vocabulary)
        except DataError as error:
            raise CheckpointError(f"the run in {folder} cannot keep this vocabulary: {error}") from error


def language_task(corpus: Corpus, *, splits: tuple[str, ...] = ("valid",)) -> LanguageTask:
    """The task of a language model on this text."""
    return LanguageTask(
        name=corpus.name,
        description=corpus.description,
        splits=splits,
        meaning=corpus.vocabulary.meaning,
        corpus=corpus,
    )
