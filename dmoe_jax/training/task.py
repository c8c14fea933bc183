"""Data of a run, as far as its metrics and its report are concerned."""

from collections.abc import Mapping
from dataclasses import dataclass

from dmoe_jax.data.corpora import Corpus
from dmoe_jax.data.vocabulary import unigram_perplexity
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


@dataclass(frozen=True, kw_only=True)
class LanguageTask(Task):
    """A text: perplexities, beside those of the model that knows nothing but the words' frequencies."""

    unit: str = "tokens"
    main: str = "perplexity"
    corpus: Corpus

    def figures(self, evaluation: Evaluation) -> Mapping[str, float]:
        """The loss in nats per token, and its perplexity."""
        return {"loss": evaluation.loss, "perplexity": evaluation.perplexity, **evaluation.metrics}

    def baseline(self, evaluation: Evaluation | None) -> Mapping[str, float]:
        """The unigram perplexity over the very words that were evaluated."""
        words = self.corpus.valid if evaluation is None or not evaluation.targets.size else evaluation.targets
        return {"unigram_perplexity": unigram_perplexity(self.corpus.train, words, len(self.corpus.vocabulary))}


def language_task(corpus: Corpus, *, splits: tuple[str, ...] = ("valid",)) -> LanguageTask:
    """The task of a language model on this text."""
    return LanguageTask(
        name=corpus.name,
        description=corpus.description,
        splits=splits,
        meaning=corpus.vocabulary.meaning,
        corpus=corpus,
    )
