"""One run of `dmoe train`: the model and its trainers as the flags say, then the run loop."""

import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import jax
import optax
import trio

from dmoe_jax.averaging import Round
from dmoe_jax.cli.averaging import open_averaging
from dmoe_jax.cli.train_options import TrainOptions
from dmoe_jax.cli.trained_models import Training, language_training, own_training, trunk_optimizer
from dmoe_jax.cli.watching import Watching, watching
from dmoe_jax.collaboration import Collaboration, GlobalStep
from dmoe_jax.collaboration.trainers import CollaborativeTrainers
from dmoe_jax.disk import CheckpointError
from dmoe_jax.metrics.monitor import Monitor
from dmoe_jax.mixture.readiness import ExpertMismatch
from dmoe_jax.mixture.remote import RemoteMixture
from dmoe_jax.mixture.statistics import TooFewExperts, check_coverage
from dmoe_jax.routing.base import RouterError
from dmoe_jax.runs.endings import CommandFailed, UsageError, mistakes_in_one_line, one_line
from dmoe_jax.swarm import Swarm
from dmoe_jax.trainer import Trainers, first_leaf
from dmoe_jax.training.balance import balance, mean_balance, trunk_bias_range
from dmoe_jax.training.engine import Totals
from dmoe_jax.training.progress import TrainingProgress
from dmoe_jax.training.run import Plan, Records, train
from dmoe_jax.training.saving import PreparedRun
from dmoe_jax.training.swarm_engine import SwarmEngine
from dmoe_jax.types import PyTree
from net.nursery import background_nursery


async def run_training(
    options: TrainOptions, run: PreparedRun, swarm: Swarm, monitor: Monitor | None = None
) -> dict[str, Any]:
    """Train as the flags say; the headline.

    If cancelled, the run folder still gets its figure, report and a checkpoint of what was reached, and a trace is
    written.

    Args:
      monitor: is shown what happens.

    Raises:
      UsageError: for data, a checkpoint or a setting that will not do, or when training goes wrong beyond help: then
        after the report. NetError: no experts, or no swarm.
    """
    with (
        TrainingProgress(options.run_length.steps) as progress,
        watching(swarm, monitor or Monitor("train"), options.report.trace, progress.say) as watch,
    ):
        for change in run.changes:
            progress.say(f"going on with another setting than before: {change}")
        facts = _Facts()
        # Listed from the beginning: `dmoe status` shows who waits and compiles, too.
        async with swarm.announced("trainer", facts.now):
            training = await (
                language_training(options, swarm, progress) if options.model is None else own_training(options, swarm)
            )
            progress.unit = training.task.unit
            with mistakes_in_one_line():
                run.check_meaning(training.task.meaning)
            await _wait_for_experts(training.mixtures, options.calls.wait_s, progress)
            watch.found_experts()
            with mistakes_in_one_line():
                optimizer = options.averaging.wrap(trunk_optimizer(options))
                # --seed decides the parameters, which all processes share; the rest of chance is each one's own.
                params = training.model.init(jax.random.key(options.data.seed))
            step = 0

            def reached(now: int) -> None:
                nonlocal step
                step = now

            try:
                async with _opened_trainers(options, swarm, training, optimizer, params, progress, watch) as opened:
                    watch.trainers(opened.trainers)
                    headline = await _train(options, run, swarm, training, opened, progress, facts, watch, reached)
                    check_coverage(swarm.statistics, options.calls.max_skipped)
                    return headline
            except (CheckpointError, OSError) as error:
                raise CommandFailed(one_line(error)) from error
            # What stays wrong ends the run: dropping step after step would not end.
            except (RouterError, FloatingPointError, TooFewExperts, BaseExceptionGroup) as error:
                leaf = first_leaf(error)
                if not isinstance(leaf, RouterError | FloatingPointError | TooFewExperts):
                    raise
                raise CommandFailed(f"{one_line(leaf)}; stopped at step {step}") from error


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """Trainers, and what they average with other processes."""

    trainers: Trainers | CollaborativeTrainers
    records: Records
    """What the metrics say of their averaging, since it was called last."""
    figures: Callable[[], Mapping[str, float | int | None]] = dict
    """What the headline does."""


@asynccontextmanager
async def _opened_trainers(
    options: TrainOptions,
    swarm: Swarm,
    training: Training,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    progress: TrainingProgress,
    watch: Watching,
) -> AsyncIterator[_Opened]:
    """The trainers of this process, and their averaging with others if the flags want it."""
    averaging, seed = options.averaging, options.data.chance_seed
    if averaging.target_batch_size:
        async with _opened_together(options, swarm, training, optimizer, params, progress, watch) as opened:
            yield opened
        return
    rounds: deque[Round] = deque()

    def averaged(done: Round) -> None:
        rounds.append(done)
        watch.averaged(done)

    trainers = swarm.trainer(training.model, optimizer, training.batches, params=params, seed=seed)
    async with open_averaging(
        averaging,
        swarm.rpc,
        swarm.dht,
        trainers.trunk,
        swarm.device,
        progress.say,
        meaning=training.model.meaning,
        max_step=options.run_length.steps,
        on_round=averaged,
    ) as averager:
        yield _Opened(
            trainers=trainers,
            records=lambda: [_round_record(rounds.popleft()) for _ in range(len(rounds))],
            figures=dict if averager is None else averager.totals.headline,
        )


@asynccontextmanager
async def _opened_together(
    options: TrainOptions,
    swarm: Swarm,
    training: Training,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    progress: TrainingProgress,
    watch: Watching,
) -> AsyncIterator[_Opened]:
    """Trainers that fill one large batch together with other processes."""
    averaging = options.averaging
    assert averaging.kind != "noloco"  # refused by `check`
    steps: deque[GlobalStep] = deque()

    def stepped(done: GlobalStep) -> None:
        steps.append(done)
        watch.averaged(done)

    async with (
        swarm.collaborate(
            training.model,
            optimizer,
            training.batches,
            target_batch_size=averaging.target_batch_size,
            average=averaging.kind,
            outer=averaging.outer_optimizer(),
            name=averaging.meeting.name,
            params=params,
            seed=options.data.chance_seed,
            config=averaging.collaboration(),
            on_step=stepped,
        ) as together,
        background_nursery() as nursery,
    ):
        if together.step:
            progress.say(f"took the state of a process that was ahead: step {together.step}")
        nursery.start_soon(_show_swarm, together.peer, averaging.target_batch_size, progress)
        yield _Opened(
            trainers=together,
            records=lambda: [("global_step", asdict(steps.popleft())) for _ in range(len(steps))],
            figures=together.peer.totals.headline,
        )


async def _train(
    options: TrainOptions,
    run: PreparedRun,
    swarm: Swarm,
    training: Training,
    opened: _Opened,
    progress: TrainingProgress,
    facts: "_Facts",
    watch: Watching,
    reached: Callable[[int], None],
) -> dict[str, Any]:
    """The run loop; `reached` is told the last step, however it ends."""
    length = options.run_length
    plan = Plan(
        steps=length.steps,
        eval_every=length.eval_every,
        eval_items=length.eval_tokens,
        final_eval_items=length.final_eval_tokens,
        checkpoint_every=length.checkpoint_every,
        max_s=60 * length.max_minutes or math.inf,
    )
    engine = facts.engine = SwarmEngine(
        opened.trainers, swarm.statistics, training.evaluation, layers=training.layers, figures=opened.figures
    )
    watch.engine(engine, training.task.unit)
    try:
        return await train(
            engine,
            run,
            plan,
            training.task,
            progress,
            facts=training.facts,
            records=opened.records,
            on_end=lambda headline: print(json.dumps(headline)) if options.report.json else None,
        )
    finally:
        reached(engine.step)


async def _show_swarm(peer: Collaboration, target: int, progress: TrainingProgress) -> None:
    """Show what the whole swarm does, every second."""
    while True:
        progress.note(swarm_line(peer.facts(), target))
        await trio.sleep(1)


def swarm_line(facts: Mapping[str, Any], target: int) -> str:
    """What a collaboration does now in a few words, for people."""
    text = f"swarm: {facts['gathered']:,} of {target:,} from {facts['peers']}, {facts['samples_per_s']:,.0f}/s"
    return text + (f", last averaged in {facts['averaged_s']:.1f} s" if facts["averaged_s"] else "")


async def _wait_for_experts(mixtures: Iterable[RemoteMixture], wait_s: float, progress: TrainingProgress) -> None:
    """Wait until every layer has a living expert of the model's shapes.

    Raises:
      NoQuorum: there is none; the message names the layer. UsageError: it has other shapes.
    """
    deadline = trio.current_time() + wait_s
    for mixture in mixtures:
        prefix, num_experts = mixture.config.prefix, math.prod(mixture.router.grid_size)
        try:
            with progress.phase(f"waiting for experts of {prefix!r}") as change:
                living = await mixture.check(timeout_s=max(0.0, deadline - trio.current_time()), say=change)
        except ExpertMismatch as error:
            raise UsageError(f"{error}; give {_flags_to_mend(error)}") from error
        progress.say(f"{prefix}: {living} of {num_experts} experts alive")


def _flags_to_mend(error: ExpertMismatch) -> str:
    """Which flags make our model fit their experts."""
    theirs, ours = len(error.theirs), len(error.ours)
    if theirs == ours:
        return "--d-model, --num-heads, --seq-len and --mem-len as on the nodes"
    if theirs > ours:
        return "--dropout, --attention-dropout or --position-dropout above 0: the nodes' experts take dropout keys"
    return "no --dropout, --attention-dropout or --position-dropout: the nodes' experts take no dropout keys"


def _round_record(done: Round) -> tuple[str, dict[str, object]]:
    """What the metrics say of a round of averaging."""
    if done.why_lost:
        return "event", {"name": "average_lost", "detail": done.why_lost}
    return "average", {
        "round": done.number,
        "peers": done.peers,
        "peers_lost": len(done.lost),
        "received": done.received,
        "sent_bytes": done.moved_bytes,
        "took_s": done.took_s,
    }


class _Facts:
    """What this trainer tells the swarm of itself, for `dmoe status`."""

    def __init__(self) -> None:
        self.engine: SwarmEngine | None = None
        """What trains; None until there are experts."""
        self._before: tuple[float, Totals] | None = None

    def now(self) -> dict[str, Any]:
        """State, step, loss, items a second and balance of the load since the last time, and failed calls."""
        if self.engine is None:
            return {"state": "waiting", "step": 0}
        totals, loss = self.engine.totals(), self.engine.last_loss
        state = "compiling" if loss is None else "training"
        facts: dict[str, Any] = {"state": state, "step": self.engine.step, "failed_calls": totals.calls_failed}
        if loss is not None and math.isfinite(loss):
            facts["loss"] = loss
        now = time.monotonic()
        if self._before is not None and now > self._before[0]:
            before = self._before[1]
            facts["items_per_s"] = (totals.items - before.items) / (now - self._before[0])
            windows = [balance(uids, totals, before) for uids in self.engine.layers.values()]
            entropy = mean_balance(windows)["load_entropy"] if windows else None
            largest = trunk_bias_range(self.engine.state())
            facts |= {} if entropy is None else {"load_entropy": entropy}
            facts |= {} if largest is None else {"bias_range": largest}
        self._before = now, totals
        return facts
