"""One run of `dmoe train`: compile, train, evaluate, report."""

import itertools
import json
import math
from typing import Any

import trio

from dmoe_jax.averaging import Round
from dmoe_jax.cli.assembly import TrainingParts, assemble, mistakes_in_one_line, wait_for_experts
from dmoe_jax.cli.averaging import open_trunk_averaging
from dmoe_jax.cli.balance_log import BalanceLog
from dmoe_jax.cli.common import UsageError, one_line
from dmoe_jax.cli.progress import TrainingProgress
from dmoe_jax.cli.saving import RunSaver, RunTotals
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.data.batches import evaluation_segments
from dmoe_jax.data.corpora import load_corpus
from dmoe_jax.data.vocabulary import unigram_perplexity
from dmoe_jax.directory import open_expert_directory
from dmoe_jax.model import Evaluation
from dmoe_jax.peer import SwarmPeer
from dmoe_jax.routing.base import Router, RouterError
from dmoe_jax.runs.figure import training_figure
from dmoe_jax.runs.report import write_report
from dmoe_jax.runs.run_folder import FIGURE, RunFolder
from dmoe_jax.trainer import StepRecord
from dmoe_jax.trunk_averaging import TrunkAveraging
from net.errors import NetError

_LOG_PERIOD_S = 1.0
"""How often call totals and expert loads are written down."""

_EVAL_BATCH = 16
"""Rows of an evaluation batch, each from another place of the text: enough places for a part to stand for the whole."""


async def run_training(command: TrainCommand, peer: SwarmPeer, router: Router) -> int:
    """Train as the command says, with the router that `checked_router` made of it; returns the exit status.

    If cancelled, the run folder still gets its figure, report and a checkpoint of what was reached.

    Raises:
      UsageError: for a corpus, folder, checkpoint or setting that will not do, or when the router's scores are no
        numbers any more: then after the report. NetError: no experts, or no swarm.
    """
    progress = TrainingProgress(command.steps)
    with mistakes_in_one_line():
        corpus = await trio.to_thread.run_sync(lambda: load_corpus(source=command.data), abandon_on_cancel=True)
    progress.say(f"corpus: {corpus.description}")
    async with open_expert_directory(peer.dht) as directory:
        with mistakes_in_one_line():
            parts = assemble(command, peer, router, corpus, directory)
        await wait_for_experts(parts, peer, directory, progress.say)
        with mistakes_in_one_line():
            settings = command.settings() | {"router_name": router.name}
            # The folder comes last: a run that could not begin leaves nothing in the way of the next one.
            folder = RunFolder.create(command.out, settings, name="train", resume=command.resume)
            run = TrainingRun(command, parts, folder, progress)
        averaging = open_trunk_averaging(
            command.averaging,
            peer.rpc,
            peer.dht,
            parts.trunk,
            parts.device,
            progress.say,
            max_step=command.steps,
            on_round=run.on_round,
        )
        async with averaging as trunk_averaging:
            return await run.run(trunk_averaging)


class TrainingRun:
    """A run that has all it needs: its parts, its folder, and what it has reached so far."""

    def __init__(
        self, command: TrainCommand, parts: TrainingParts, folder: RunFolder, progress: TrainingProgress
    ) -> None:
        self._command = command
        self._parts = parts
        self._folder = folder
        self._progress = progress
        self._nursery: trio.Nursery | None = None
        self._evaluation: Evaluation | None = None
        self._evaluating = trio.Lock()
        self._averaging: TrunkAveraging | None = None
        self._totals = RunTotals()
        self._saver = RunSaver(folder.path, parts.trunk, parts.trainers, parts.statistics, self._totals)
        if command.resume:
            self._saver.restore()
            progress.say(f"continuing from step {parts.trunk.step}")
        self._resumed_at = trio.current_time() - self._totals.time_s
        self._balance = BalanceLog(folder, parts.statistics, parts.config)

    async def run(self, averaging: TrunkAveraging | None = None) -> int:
        """The whole run; the exit status.

        Args:
          averaging: with other processes.

        Raises:
          UsageError: the router's scores, or the very first loss, are no numbers; the report is written.
        """
        self._averaging = averaging
        self._progress.say(f"run folder: {self._folder.path}")
        corpus = self._parts.corpus
        baseline = unigram_perplexity(corpus.train, corpus.valid, self._parts.config.vocab_size)
        self._folder.log("baseline", unigram_perplexity=baseline)
        is_complete, failure = False, None
        try:
            try:
                with self._progress:
                    await self._compile()
                    await self._train()
                    await self._evaluate(self._command.final_eval_tokens, show_progress=True)
                is_complete = True
            # Scores that are no numbers stay so: dropping step after step would not end.
            except* (RouterError, FloatingPointError) as errors:
                failure = _first_leaf(errors)
        finally:
            # Also after Ctrl-C: what was reached is worth its report. Nothing here waits for the network.
            self._finish(baseline, is_complete=is_complete, failure=failure)
        if failure is not None:
            raise UsageError(f"{one_line(failure)}; stopped at step {self._parts.trunk.step}") from failure
        return 0

    async def _compile(self) -> None:
        """One evaluation and one step alone, which compile everything that the run will use.

        Compilation blocks this process for seconds. Done while other trainers wait for experts, it would make their
        answers look late.
        """
        self._progress.say("compiling")
        await self._evaluate(self._command.eval_tokens)
        if self._parts.trunk.step < self._command.steps:
            self._on_step(await self._parts.trainers[0].step())
        self._resumed_at = trio.current_time() - self._totals.time_s

    async def _train(self) -> None:
        command = self._command
        limit_s = 60 * command.max_minutes if command.max_minutes > 0 else math.inf
        try:
            with trio.move_on_after(limit_s) as limit:
                async with trio.open_nursery() as background:
                    background.start_soon(self._log_calls)
                    async with trio.open_nursery() as nursery:
                        self._nursery = nursery
                        for trainer in self._parts.trainers:
                            nursery.start_soon(trainer.run, command.steps, self._on_step, self._on_lost)
                    background.cancel_scope.cancel()
        finally:
            self._totals.time_s = self._now()
        if limit.cancelled_caught:
            self._event("time_limit", f"stopped after {command.max_minutes} minutes at step {self._parts.trunk.step}")
        self._log_totals()

    def _on_step(self, record: StepRecord) -> None:
        self._totals.tokens += record.items
        self._totals.staleness += record.staleness
        self._folder.log(
            "train",
            step=record.step,
            trainer=record.trainer,
            loss=record.loss,
            tokens=record.items,
            staleness=record.staleness,
            time_s=self._now(),
        )
        self._progress.update(
            record.step, record.loss, self._totals.tokens / max(self._now(), 1e-9), self._failed_calls
        )
        if self._nursery is not None and record.step < self._command.steps:
            if record.step % self._command.eval_every == 0:
                self._nursery.start_soon(self._evaluate_beside_training)
            if record.step % self._command.checkpoint_every == 0:
                self._totals.time_s = self._now()
                self._nursery.start_soon(self._saver.save)

    def _on_lost(self, trainer: int, error: Exception) -> None:
        self._totals.steps_lost += 1
        self._event("step_lost", f"trainer {trainer}: {error}")

    def on_round(self, done: Round) -> None:
        """Write down what a round of averaging with other processes came to."""
        if done.why_lost:
            self._event("average_lost", done.why_lost)
        self._folder.log(
            "average",
            step=self._parts.trunk.step,
            time_s=self._now(),
            round=done.number,
            peers=done.peers,
            received=done.received,
            took_s=done.took_s,
        )

    async def _evaluate_beside_training(self) -> None:
        """An evaluation of the trunk as it is now. One at a time; if the last is not done, this one is left out."""
        try:
            self._evaluating.acquire_nowait()
        except trio.WouldBlock:
            return
        try:
            await self._evaluate(self._command.eval_tokens)
        except NetError as error:
            self._event("evaluation_lost", str(error))
        finally:
            self._evaluating.release()

    async def _evaluate(self, num_tokens: int, *, show_progress: bool = False) -> None:
        """Evaluate about `num_tokens` of validation text, 0 for all of it.

        The text is read from several places at once, evenly spaced, so that a part of it stands for the whole.
        """
        step, tokens_seen, seq_len = self._parts.trunk.step, self._totals.tokens, self._parts.config.seq_len
        batches = evaluation_segments(self._parts.corpus.valid, batch_size=_EVAL_BATCH, seq_len=seq_len)
        tokens = min(num_tokens, self._parts.corpus.valid.size) or self._parts.corpus.valid.size
        num_batches = math.ceil(tokens / (_EVAL_BATCH * seq_len))
        on_batch = self._progress.start_evaluation(num_batches) if show_progress else lambda: None
        self._evaluation = evaluation = await self._parts.model.evaluate(
            self._parts.trunk.params, itertools.islice(batches, num_batches), on_batch
        )
        self._folder.log(
            "eval",
            step=step,
            perplexity=evaluation.perplexity,
            tokens=evaluation.targets.size,
            tokens_seen=tokens_seen,
            split="valid",
            time_s=self._now(),
        )
        self._balance.log(step)
        self._progress.say(f"step {step}: validation perplexity {evaluation.perplexity:.1f}")

    async def _log_calls(self) -> None:
        while True:
            self._log_totals()
            await trio.sleep(_LOG_PERIOD_S)

    def _log_totals(self) -> None:
        statistics = self._parts.statistics
        self._folder.log(
            "calls", step=self._parts.trunk.step, time_s=self._now(), ok=statistics.ok, failed=self._failed_calls
        )
        peers = {uid: str(contact.address) for uid, contact in statistics.host.items()}
        self._folder.log("experts", step=self._parts.trunk.step, load=statistics.load, peer=peers)

    @property
    def _failed_calls(self) -> int:
        """Calls that brought no answer in time, for whatever reason."""
        return self._parts.statistics.failed + self._parts.statistics.late

    def _event(self, name: str, detail: str) -> None:
        self._folder.log("event", name=name, step=self._parts.trunk.step, time_s=self._now(), detail=detail)

    def _now(self) -> float:
        return trio.current_time() - self._resumed_at

    def _finish(self, baseline: float, *, is_complete: bool, failure: BaseException | None) -> None:
        if failure is not None:
            self._event("failed", one_line(failure))
        elif not is_complete:
            self._event("interrupted", f"at step {self._parts.trunk.step}; continue with --resume")
        self._saver.save_now()
        headline = self._headline(baseline)
        self._folder.log("headline", **headline)
        metrics = self._folder.metrics()
        title = f"DMoE Transformer-XL on {self._parts.corpus.name}"
        training_figure(metrics, self._folder.path / FIGURE, title=title)
        write_report(self._folder, headline, title=title, summary=f"Corpus: {self._parts.corpus.description}.")
        self._progress.say(f"report: {self._folder.path / 'report.md'}")
        if self._command.json:
            print(json.dumps(headline))

    def _headline(self, baseline: float) -> dict[str, Any]:
        unigram = self._unigram_of(self._evaluation) if self._evaluation else baseline
        statistics, evaluation, totals = self._parts.statistics, self._evaluation, self._totals
        return {
            "corpus": self._parts.corpus.name,
            "router": self._parts.router.name,
            "validation_perplexity": evaluation.perplexity if evaluation else None,
            "unigram_perplexity": unigram,
            "perplexity_over_unigram": evaluation.perplexity / unigram if evaluation else None,
            "evaluated_tokens": evaluation.targets.size if evaluation else 0,
            "steps": self._parts.trunk.step,
            "trainers": self._command.num_trainers,
            "training_tokens": totals.tokens,
            "training_s": totals.time_s,
            "tokens_per_s": totals.tokens / max(totals.time_s, 1e-9),
            "calls_ok": statistics.ok,
            "calls_failed": self._failed_calls,
            "calls_late": statistics.late,
            "steps_lost": totals.steps_lost,
            **self._balance.headline(),
            **(self._averaging.headline() if self._averaging is not None else {}),
            "samples_without_experts": statistics.skipped_samples,
            "mean_trunk_staleness": totals.staleness / max(1, self._parts.trunk.step),
            "mean_expert_staleness": statistics.staleness_total / max(1, statistics.staleness_calls),
        }

    def _unigram_of(self, evaluation: Evaluation) -> float:
        """The unigram baseline over the very words that were evaluated."""
        return unigram_perplexity(self._parts.corpus.train, evaluation.targets, self._parts.config.vocab_size)


def _first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
