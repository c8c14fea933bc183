"""From an engine to a run: train, pause to evaluate and save, report. The same for every engine.

A run is a row of stretches of `eval_every` updates with a pause after each: evaluation, figures, checkpoint. Whatever
ends a run early (Ctrl-C, a power cut, a loss of NaN), it goes on from its last pause, and then gives bit for bit what
it would have given without the break: what was written of the lost stretch is cut from the metrics, so that no step is
in them twice.
"""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dmoe_jax.checkpoints import Checkpoints, host_copy
from dmoe_jax.cli.progress import TrainingProgress
from dmoe_jax.data.corpora import Corpus
from dmoe_jax.data.vocabulary import unigram_perplexity
from dmoe_jax.model import Evaluation
from dmoe_jax.runs.balance import layer_balances, mean_balance
from dmoe_jax.runs.figure import training_figure
from dmoe_jax.runs.report import write_report
from dmoe_jax.runs.run_folder import FIGURE, RunFolder, plain
from dmoe_jax.trainer import StepRecord
from experiments.transformer_xl.engine import Engine, Totals
from experiments.transformer_xl.resuming import cut_metrics

CHECKPOINT_FOLDER = "checkpoints"

_NO_FACTS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run does beside training."""

    steps: int
    """Updates of the whole run."""
    eval_every: int
    """Updates between two pauses."""
    eval_tokens: int = 16_384
    """Validation words of the evaluation in a pause, read from evenly spaced places; 0 for all."""
    final_eval_tokens: int = 0
    """Words of validation and of test text of the evaluations at the end; 0 for all."""
    eval_batch_tokens: int = 640
    """Words in one batch of an evaluation, for its progress bar."""
    num_layers: int = 0
    """Layers of a mixture, for the balance of its load."""
    grid_size: tuple[int, ...] = ()
    """Extents of its grids; () for a dense model."""

    def __post_init__(self) -> None:
        for name in ("steps", "eval_every", "eval_batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("eval_tokens", "final_eval_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


def train(
    engine: Engine,
    folder: RunFolder,
    plan: Plan,
    corpus: Corpus,
    progress: TrainingProgress,
    *,
    facts: Mapping[str, object] = _NO_FACTS,
) -> dict[str, Any]:
    """Train to the end of the plan, from the folder's last checkpoint if it holds one.

    Also when it ends early, the folder has a figure and a report of what was reached.

    Args:
      engine: at its beginning; it is moved on to the checkpoint here.
      folder: from `resuming.open_run`.
      plan: as in the run that is resumed.
      corpus: the text.
      progress: shows where the run is.
      facts: what the headline is to open with, such as the number of parameters.

    Returns:
      The headline: what the run came to.

    Raises:
      CheckpointError: the folder's checkpoint is of another model.
      KeyboardInterrupt, FloatingPointError, RouterError, NetError: as the engine raised them, after the report.
    """
    run = _Run(engine, folder, plan, corpus, progress, facts)
    try:
        run.restore()
        try:
            with progress:
                run.train()
        except BaseException as error:
            run.end_early(error)
            raise
        return run.finish(is_complete=True)
    finally:
        run.close()


def is_interrupt(error: BaseException) -> bool:
    """Whether Ctrl-C is in it; a nursery may have put it into groups."""
    return BaseExceptionGroup("", [error]).subgroup(KeyboardInterrupt) is not None


class _Run:
    """A run under way."""

    def __init__(
        self,
        engine: Engine,
        folder: RunFolder,
        plan: Plan,
        corpus: Corpus,
        progress: TrainingProgress,
        facts: Mapping[str, object],
    ) -> None:
        self._engine = engine
        self._folder = folder
        self._plan = plan
        self._corpus = corpus
        self._progress = progress
        self._facts = facts
        self._checkpoints = Checkpoints(folder.path / CHECKPOINT_FOLDER)
        self._totals = Totals()
        """As of the last pause."""
        self._step = self._tokens = self._staleness = 0
        """As of the last update that was reported."""
        self._training_s = 0.0
        """Seconds of training up to the last pause."""
        self._timed_s = 0.0
        """Those of them in which nothing was compiled, and the tokens trained on in them: the throughput."""
        self._timed_tokens = 0
        self._stretch_began = self._timed_from = 0.0
        self._is_warm = False
        self._evaluations: dict[str, Evaluation] = {}
        self._last_balances: dict[str, Any] = {}
        """Of the last stretch, where a collapse shows."""

    def restore(self) -> None:
        """Go on from the last checkpoint, if there is one; without one, begin."""
        size = 0
        if self._checkpoints.latest_step() is not None:
            step, state, facts = self._checkpoints.restore_latest(self._engine.state())
            self._engine.load(state, facts["engine"])
            self._totals = self._engine.totals()
            self._step, self._tokens, self._staleness = step, self._totals.tokens, self._totals.staleness
            self._training_s, self._timed_s = facts["training_s"], facts["timed_s"]
            self._timed_tokens, size = facts["timed_tokens"], facts["metrics_size"]
            self._progress.say(f"{self._engine.name}: continuing from step {step}")
        cut_metrics(self._folder, size)
        if not self._step:
            vocab_size = len(self._corpus.vocabulary)
            self._folder.log(
                "baseline",
                unigram_perplexity=unigram_perplexity(self._corpus.train, self._corpus.valid, vocab_size),
                test_unigram_perplexity=unigram_perplexity(self._corpus.train, self._corpus.test, vocab_size),
            )

    def train(self) -> None:
        """All stretches that are left, and the last evaluations."""
        plan = self._plan
        while self._engine.step < plan.steps:
            num_steps = min(plan.eval_every - self._engine.step % plan.eval_every, plan.steps - self._engine.step)
            self._stretch_began = time.perf_counter()
            self._timed_from = self._stretch_began if self._is_warm else math.inf
            self._engine.advance(num_steps, self._on_step)
            self._end_stretch()
            self._pause()
        for split in ("valid", "test"):
            self._evaluate(split, plan.final_eval_tokens, show_progress=True)

    def _on_step(self, record: StepRecord) -> None:
        self._step = record.step
        self._tokens += record.items
        self._staleness += record.staleness
        now = time.perf_counter()
        if self._is_warm:
            self._timed_tokens += record.items
        else:
            # The first step of a process compiles.
            self._is_warm, self._timed_from = True, now
        self._folder.log(
            "train",
            step=record.step,
            trainer=record.trainer,
            loss=record.loss,
            tokens=record.items,
            staleness=record.staleness,
            time_s=self._training_s + now - self._stretch_began,
        )
        timed_s = self._timed_s + now - self._timed_from
        self._progress.update(
            record.step, record.loss, self._timed_tokens / max(timed_s, 1e-9), self._totals.calls_failed
        )

    def _end_stretch(self) -> None:
        now = time.perf_counter()
        self._training_s += now - self._stretch_began
        self._timed_s += max(0.0, now - self._timed_from)

    def _pause(self) -> None:
        before, self._totals = self._totals, self._engine.totals()
        self._log_totals(before)
        # At the end of the run the evaluation of the whole text follows.
        if self._engine.step < self._plan.steps:
            self._evaluate("valid", self._plan.eval_tokens)
        facts = {
            "engine": self._engine.facts(),
            "training_s": self._training_s,
            "timed_s": self._timed_s,
            "timed_tokens": self._timed_tokens,
            "metrics_size": os.path.getsize(self._folder.metrics_path),
        }
        self._checkpoints.save(self._engine.step, host_copy(self._engine.state()), facts)

    def _log_totals(self, before: Totals) -> None:
        totals, plan, now = self._totals, self._plan, {"step": self._engine.step, "time_s": self._training_s}
        if totals.calls_ok + totals.calls_failed:
            self._folder.log("calls", **now, ok=totals.calls_ok, failed=totals.calls_failed)
        if totals.steps_lost > before.steps_lost:
            lost = totals.steps_lost - before.steps_lost
            self._folder.log("event", **now, name="steps_lost", detail=f"{lost} since the pause before")
        if plan.grid_size:
            self._folder.log("experts", **now, load=totals.load, peer={})
            self._last_balances = self._balances(totals, before)
            for layer, figures in self._last_balances.items():
                self._folder.log("balance", **now, layer=layer, **plain(figures))

    def _balances(self, totals: Totals, before: Totals) -> dict[str, Any]:
        """The balance of each layer between two totals."""
        return layer_balances(
            totals.load,
            num_layers=self._plan.num_layers,
            grid_size=self._plan.grid_size,
            before=before.load,
            ok=totals.calls_ok - before.calls_ok,
            failed=totals.calls_failed - before.calls_failed,
        )

    def _evaluate(self, split: str, num_tokens: int, *, show_progress: bool = False) -> None:
        ids = self._corpus.valid if split == "valid" else self._corpus.test
        tokens = min(num_tokens, ids.size) or ids.size
        num_batches = math.ceil(tokens / self._plan.eval_batch_tokens)
        name = {"valid": "validation", "test": "test"}[split]
        on_batch = self._progress.start_evaluation(num_batches, text=f"{name} text") if show_progress else lambda: None
        evaluation = self._engine.evaluate(ids, max_tokens=num_tokens or None, on_batch=on_batch)
        self._evaluations[split] = evaluation
        self._folder.log(
            "eval",
            step=self._engine.step,
            split=split,
            perplexity=evaluation.perplexity,
            loss=evaluation.loss,
            tokens=evaluation.targets.size,
            tokens_seen=self._totals.tokens,
            time_s=self._training_s,
            virtual_s=self._totals.virtual_s,
        )
        self._progress.say(
            f"{self._engine.name}, step {self._engine.step}: {name} perplexity {evaluation.perplexity:.1f}"
        )

    def end_early(self, error: BaseException) -> None:
        """Write down what ended the run, and its report."""
        saved = self._checkpoints.latest_step()
        name, why = ("interrupted", "") if is_interrupt(error) else ("failed", f"{error}; ")
        detail = f"{why}at step {self._step}; --resume goes on from step {saved or 0}"
        self._folder.log("event", name=name, step=self._step, time_s=self._training_s, detail=detail)
        self.finish(is_complete=False)

    def finish(self, *, is_complete: bool) -> dict[str, Any]:
        """Log the headline, draw the figure and write the report."""
        headline = self._headline(is_complete)
        title = f"Transformer-XL on {self._corpus.name}: {self._engine.name}"
        training_figure(self._folder.metrics(), self._folder.path / FIGURE, title=title)
        write_report(self._folder, headline, title=title, summary=f"Corpus: {self._corpus.description}.")
        # Last: who finds this record need not look for the others.
        self._folder.log("headline", **headline)
        return headline

    def _headline(self, is_complete: bool) -> dict[str, Any]:
        totals, valid = self._totals, self._evaluations.get("valid")
        test = self._evaluations.get("test") if is_complete else None
        calls = totals.calls_ok + totals.calls_failed
        unigram = None
        if valid is not None:
            # Over the very words that were evaluated.
            unigram = unigram_perplexity(self._corpus.train, valid.targets, len(self._corpus.vocabulary))
        return {
            **self._facts,
            "corpus": self._corpus.name,
            "validation_perplexity": valid.perplexity if valid else None,
            "test_perplexity": test.perplexity if test else None,
            "unigram_perplexity": unigram,
            "perplexity_over_unigram": valid.perplexity / unigram if valid and unigram else None,
            "evaluated_tokens": valid.targets.size if valid else 0,
            "steps": self._step,
            "tokens": self._tokens,
            "tokens_per_s": self._timed_tokens / self._timed_s if self._timed_s else None,
            "training_s": self._training_s,
            "virtual_s": totals.virtual_s,
            "staleness": self._staleness / self._step if self._step else None,
            "calls_ok": totals.calls_ok,
            "calls_failed": totals.calls_failed,
            "failed_call_share": totals.calls_failed / calls if calls else None,
            "steps_lost": totals.steps_lost,
            **(
                mean_balance((self._last_balances or self._balances(totals, Totals())).values())
                if self._plan.grid_size
                else {}
            ),
            "complete": is_complete,
        }

    def close(self) -> None:
        """Free what checkpoints hold."""
        self._checkpoints.close()
