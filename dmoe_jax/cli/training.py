"""One run of `dmoe train`: from joining the swarm to the report."""

import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
import trio

from dmoe_jax.cli.common import EXIT_INTERRUPTED, SwarmPeer, UsageError
from dmoe_jax.cli.options import layer_prefix
from dmoe_jax.cli.progress import TrainingProgress
from dmoe_jax.data.batches import SegmentStream, evaluation_segments
from dmoe_jax.data.corpora import Corpus, load_corpus
from dmoe_jax.data.errors import DataError
from dmoe_jax.data.vocabulary import unigram_perplexity
from dmoe_jax.directory import ExpertDirectory, open_expert_directory
from dmoe_jax.grid import ExpertUid, all_uids
from dmoe_jax.mixture.fan_out import CallPolicy, CallStatistics, ExpertCaller
from dmoe_jax.mixture.remote import MixtureConfig, RemoteMixture
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.node.device import ThreadDevice
from dmoe_jax.node.requests import describe_spec
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.runs.figure import training_figure
from dmoe_jax.runs.report import write_report
from dmoe_jax.runs.run_folder import FIGURE, RunFolder
from dmoe_jax.trainer import Evaluation, SharedTrunk, StepRecord, SwarmModel, Trainer
from net.errors import NetError, NoQuorum
from net.identity import Contact

if TYPE_CHECKING:
    from dmoe_jax.cli.train import TrainCommand

_WAIT_FOR_EXPERTS_S = 60.0
"""A node that was started together with us may still be compiling."""

_ASK_PERIOD_S = 0.5
"""Between two looks for experts while there are none."""

_LOG_PERIOD_S = 1.0
"""How often call totals and expert loads are written down."""

_EVAL_BATCH = 8
"""Rows of an evaluation batch: wide enough to fill the experts' calls, few enough to keep memory warm."""


async def run_training(command: "TrainCommand", peer: SwarmPeer) -> int:
    """Train as the command says; returns the exit status.

    If cancelled, the run folder still gets its figure and report of what was reached.
    """
    try:
        corpus = await trio.to_thread.run_sync(lambda: load_corpus(source=command.data), abandon_on_cancel=True)
        folder = RunFolder.create(command.out, command.settings(), name="train")
    except (DataError, ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    async with _open_run(command, peer, corpus, folder) as run:
        return await run.run()


@asynccontextmanager
async def _open_run(
    command: "TrainCommand", peer: SwarmPeer, corpus: Corpus, folder: RunFolder
) -> AsyncIterator["TrainingRun"]:
    async with open_expert_directory(peer.dht) as directory:
        yield TrainingRun(command, peer, corpus, folder, directory)


class TrainingRun:
    """The parts of one run and what it has reached so far."""

    def __init__(
        self,
        command: "TrainCommand",
        peer: SwarmPeer,
        corpus: Corpus,
        folder: RunFolder,
        directory: ExpertDirectory,
    ) -> None:
        self._command = command
        self._peer = peer
        self._corpus = corpus
        self._folder = folder
        self._directory = directory
        self._caller = ExpertCaller(peer.rpc, directory, CallStatistics())
        self._device = ThreadDevice()
        self._config, self._model, self._trunk = self._build()
        self._trainers = self._make_trainers()
        self._progress = TrainingProgress(command.steps)
        self._started_at = trio.current_time()
        self._tokens = 0
        self._training_s = 0.0
        self._lost_steps = 0
        self._staleness_total = 0
        self._nursery: trio.Nursery | None = None
        self._evaluation: Evaluation | None = None
        self._evaluating = trio.Lock()

    def _build(self) -> tuple[txl.TransformerXLConfig, SwarmModel, SharedTrunk]:
        command, sizes = self._command, self._command.expert
        try:
            config = txl.TransformerXLConfig(
                vocab_size=len(self._corpus.vocabulary),
                d_model=sizes.d_model,
                num_layers=command.num_layers,
                num_heads=sizes.num_heads,
                d_ff=sizes.d_ff,
                seq_len=sizes.seq_len,
                mem_len=sizes.mem_len,
                grid_size=command.grid_size,
                k_best=command.k_best,
                # A small vocabulary has no words beyond the later cutoffs.
                cutoffs=tuple(cutoff for cutoff in command.cutoffs if cutoff < len(self._corpus.vocabulary)),
            )
            policy = CallPolicy(k_min=command.k_min, grace_s=command.grace_s, timeout_s=command.timeout_s)
        except ValueError as error:
            raise UsageError(str(error)) from error
        router = product_key(config.grid_size)
        mixtures = [
            RemoteMixture(
                expert=config.expert(),
                router=router,
                directory=self._directory,
                caller=self._caller,
                device=self._device,
                config=MixtureConfig(prefix=layer_prefix(layer), k_best=command.k_best, policy=policy),
            )
            for layer in range(config.num_layers)
        ]
        schedule = optax.warmup_cosine_decay_schedule(
            0.0,
            command.learning_rate,
            command.warmup_steps,
            command.steps,
            end_value=0.1 * command.learning_rate,
        )
        optimizer = optax.chain(optax.clip_by_global_norm(command.grad_clip), optax.adam(schedule))
        counts = np.bincount(self._corpus.train, minlength=config.vocab_size)
        params = txl.init_trunk(jax.random.key(command.seed), config, router, word_counts=counts)
        return (
            config,
            SwarmModel(config, txl.segments(config, router), mixtures),
            SharedTrunk(params, optimizer, self._device),
        )

    def _make_trainers(self) -> list[Trainer]:
        command = self._command
        try:
            streams = [
                SegmentStream(
                    self._corpus.train,
                    batch_size=command.batch_size,
                    seq_len=self._config.seq_len,
                    shard=shard,
                    num_shards=command.num_trainers,
                    seed=command.seed,
                )
                for shard in range(command.num_trainers)
            ]
        except ValueError as error:
            raise UsageError(str(error)) from error
        return [Trainer(index, self._model, self._trunk, stream) for index, stream in enumerate(streams)]

    async def run(self) -> int:
        """The whole run; the exit status."""
        self._progress.say(f"corpus: {self._corpus.description}")
        self._progress.say(f"run folder: {self._folder.path}")
        await self._find_experts()
        baseline = unigram_perplexity(self._corpus.train, self._corpus.valid, self._config.vocab_size)
        self._folder.log("baseline", unigram_perplexity=baseline)
        status = EXIT_INTERRUPTED
        try:
            with self._progress:
                await self._compile()
                await self._train()
                self._training_s = self._now()
                self._progress.say("evaluating on validation text")
                await self._evaluate(self._command.final_eval_tokens)
            status = 0
        finally:
            # Also after Ctrl-C: what was reached is worth its report. Nothing here waits for the network.
            self._finish(baseline, is_complete=status == 0)
        return status

    async def _find_experts(self) -> None:
        """Wait until every layer has a living expert, and check that its shapes are ours.

        Raises:
          NoQuorum: naming the layer, when there is none within a minute.
          UsageError: when the swarm's experts have other shapes.
        """
        expert = self._config.expert()
        ours = [describe_spec(spec) for spec in (*expert.inputs, expert.output)]
        for layer in range(self._config.num_layers):
            uids = all_uids(layer_prefix(layer), self._config.grid_size)
            living = await self._living_experts(layer, uids)
            uid, contact = next(iter(living.items()))
            reply = await self._peer.rpc.call(contact.address, "expert.info", {"uid": str(uid)}, timeout_s=10.0)
            theirs = [*reply.body.get("inputs", []), reply.body.get("output")]
            if theirs != ours:
                raise UsageError(
                    f"the experts of this swarm have other shapes: expert {uid} at {contact} is a "
                    f"{reply.body.get('kind')} with {_shapes(theirs)}, this model needs {_shapes(ours)}; "
                    "give --d-model, --seq-len and --mem-len as on the nodes"
                )
            self._progress.say(f"{layer_prefix(layer)}: {len(living)} of {len(uids)} experts alive")

    async def _living_experts(self, layer: int, uids: tuple[ExpertUid, ...]) -> dict[ExpertUid, Contact]:
        """The living experts of a layer: at least one, or NoQuorum after a minute of asking twice a second."""
        for _ in range(int(_WAIT_FOR_EXPERTS_S / _ASK_PERIOD_S)):
            found = await self._directory.find_experts(uids)
            if living := {uid: contact for uid, contact in found.items() if contact is not None}:
                return living
            await trio.sleep(_ASK_PERIOD_S)
        raise NoQuorum(f"no expert of {layer_prefix(layer)!r} was announced within {_WAIT_FOR_EXPERTS_S:.0f} s")

    async def _compile(self) -> None:
        """One evaluation and one step alone, which compile everything that the run will use.

        Compilation blocks this process for seconds. Done while other trainers wait for experts, it would make their
        answers look late.
        """
        self._progress.say("compiling")
        self._started_at = trio.current_time()
        await self._evaluate(self._command.eval_tokens)
        if self._trunk.step < self._command.steps:
            self._on_step(await self._trainers[0].step())
        self._started_at, self._tokens = trio.current_time(), 0

    async def _train(self) -> None:
        command = self._command
        limit_s = 60 * command.max_minutes if command.max_minutes > 0 else float("inf")
        with trio.move_on_after(limit_s) as limit:
            async with trio.open_nursery() as background:
                background.start_soon(self._log_calls)
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    for trainer in self._trainers:
                        nursery.start_soon(trainer.run, command.steps, self._on_step, self._on_lost)
                background.cancel_scope.cancel()
        if limit.cancelled_caught:
            self._event("time_limit", f"stopped after {command.max_minutes} minutes at step {self._trunk.step}")
        self._log_totals()

    def _on_step(self, record: StepRecord) -> None:
        self._tokens += record.tokens
        self._staleness_total += record.staleness
        self._folder.log(
            "train",
            step=record.step,
            trainer=record.trainer,
            loss=record.loss,
            tokens=record.tokens,
            staleness=record.staleness,
            time_s=self._now(),
        )
        self._progress.update(record.step, record.loss, self._tokens / max(self._now(), 1e-9), self._failed_calls)
        is_due = record.step % self._command.eval_every == 0 and record.step < self._command.steps
        if is_due and self._nursery is not None:
            self._nursery.start_soon(self._evaluate_beside_training)

    def _on_lost(self, trainer: int, error: Exception) -> None:
        self._lost_steps += 1
        self._event("step_lost", f"trainer {trainer}: {error}")

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

    async def _evaluate(self, num_tokens: int) -> None:
        """Evaluate about `num_tokens` of validation text, 0 for all of it.

        The text is read from several places at once, evenly spaced, so that a part of it stands for the whole.
        """
        step, seq_len = self._trunk.step, self._config.seq_len
        batches = evaluation_segments(self._corpus.valid, batch_size=_EVAL_BATCH, seq_len=seq_len)
        if num_tokens:
            batches = itertools.islice(batches, max(1, num_tokens // (_EVAL_BATCH * seq_len)))
        self._evaluation = evaluation = await self._model.evaluate(self._trunk.params, batches)
        self._folder.log(
            "eval",
            step=step,
            perplexity=evaluation.perplexity,
            tokens=evaluation.targets.size,
            split="valid",
            time_s=self._now(),
        )
        self._progress.say(f"step {step}: validation perplexity {evaluation.perplexity:.1f}")

    async def _log_calls(self) -> None:
        while True:
            self._log_totals()
            await trio.sleep(_LOG_PERIOD_S)

    def _log_totals(self) -> None:
        statistics = self._caller.statistics
        self._folder.log(
            "calls", step=self._trunk.step, time_s=self._now(), ok=statistics.ok, failed=self._failed_calls
        )
        peers = {uid: str(contact.address) for uid, contact in statistics.host.items()}
        self._folder.log("experts", step=self._trunk.step, load=statistics.load, peer=peers)

    @property
    def _failed_calls(self) -> int:
        """Calls that brought no answer in time, for whatever reason."""
        return self._caller.statistics.failed + self._caller.statistics.late

    def _event(self, name: str, detail: str) -> None:
        self._folder.log("event", name=name, step=self._trunk.step, time_s=self._now(), detail=detail)

    def _now(self) -> float:
        return trio.current_time() - self._started_at

    def _finish(self, baseline: float, *, is_complete: bool) -> None:
        if not is_complete:
            self._event("interrupted", f"at step {self._trunk.step}")
        headline = self._headline(baseline)
        self._folder.log("headline", **headline)
        metrics = self._folder.metrics()
        title = f"DMoE Transformer-XL on {self._corpus.name}"
        training_figure(metrics, self._folder.path / FIGURE, title=title)
        write_report(self._folder, headline, title=title, summary=f"Corpus: {self._corpus.description}.")
        self._progress.say(f"report: {self._folder.path / 'report.md'}")
        if self._command.json:
            print(json.dumps(headline))

    def _headline(self, baseline: float) -> dict[str, Any]:
        statistics, command, evaluation = self._caller.statistics, self._command, self._evaluation
        seconds = self._training_s or self._now()
        return {
            "corpus": self._corpus.name,
            "validation_perplexity": evaluation.perplexity if evaluation else None,
            "unigram_perplexity": baseline,
            "perplexity_over_unigram": evaluation.perplexity / self._unigram_of(evaluation) if evaluation else None,
            "evaluated_tokens": evaluation.targets.size if evaluation else 0,
            "steps": self._trunk.step,
            "trainers": command.num_trainers,
            "training_tokens": self._tokens,
            "training_s": seconds,
            "tokens_per_s": self._tokens / seconds,
            "calls_ok": statistics.ok,
            "calls_failed": self._failed_calls,
            "calls_late": statistics.late,
            "steps_lost": self._lost_steps,
            "samples_without_experts": statistics.skipped_samples,
            "mean_trunk_staleness": self._staleness_total / max(1, self._trunk.step),
            "mean_expert_staleness": statistics.staleness_total / max(1, statistics.staleness_calls),
        }

    def _unigram_of(self, evaluation: Evaluation) -> float:
        """The unigram baseline over the very words that were evaluated."""
        return unigram_perplexity(self._corpus.train, evaluation.targets, self._config.vocab_size)


def _shapes(specs: list[Any]) -> str:
    with contextlib.suppress(TypeError, KeyError):
        return ", ".join(f"{spec['name']} {spec['dtype']}{spec['shape']}" for spec in specs)
    return repr(specs)[:200]
