"""One run of `dmoe train`: the model and its trainers as the flags say, then the run loop."""

import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import jax
import trio

from dmoe_jax.cli.train_options import TrainOptions
from dmoe_jax.cli.trained_models import Training, language_training, own_training, trunk_optimizer
from dmoe_jax.cli.watching import Watching, watching
from dmoe_jax.collaboration import Collaboration
from dmoe_jax.machine.disk import CheckpointError
from dmoe_jax.metrics.monitor import Monitor
from dmoe_jax.mixture.readiness import ExpertMismatch
from dmoe_jax.mixture.remote import RemoteMixture
from dmoe_jax.mixture.statistics import TooFewExperts, check_coverage
from dmoe_jax.routing.base import RouterError
from dmoe_jax.runs.endings import CommandFailed, UsageError, mistakes_in_one_line, one_line
from dmoe_jax.swarm.swarm import Swarm
from dmoe_jax.trainer import Trainers, first_leaf
from dmoe_jax.training.balance import balance, mean_balance, trunk_bias_range
from dmoe_jax.training.engine import Totals
from dmoe_jax.training.progress import TrainingProgress
from dmoe_jax.training.run import Plan, train
from dmoe_jax.training.saving import PreparedRun
from dmoe_jax.training.swarm_engine import SwarmEngine
from dmoe_jax.trunk import open_trunk_averaging
from dmoe_net.nursery import background_nursery

_Figures = Callable[[], Mapping[str, float | int | None]]


async def run_training(
    options: TrainOptions, run: PreparedRun, swarm: Swarm, monitor: Monitor | None = None
) -> dict[str, Any]:
    """Train as the flags say; the headline.

    If cancelled, the run folder still gets its figure, report and a checkpoint of what was reached, and a trace is
    written.

    Raises:
      UsageError: for data, a checkpoint or a setting that will not do, or when training goes wrong beyond help: then
        after the report. NetError: no experts, or no swarm.
    """
    facts = _Facts()
    with (
        TrainingProgress(options.run_length.steps) as progress,
        watching(swarm, monitor or Monitor("train"), options.report.trace, progress.say) as watch,
    ):
        for change in run.changes:
            progress.say(f"going on with another setting than before: {change}")
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
            try:
                async with _opened_trainers(options, swarm, training, progress, watch) as (trainers, figures):
                    engine = facts.engine = SwarmEngine(
                        trainers, swarm.statistics, training.evaluation, layers=training.layers, figures=figures
                    )
                    watch.begins(engine, training.task.unit)
                    headline = await train(
                        engine,
                        run,
                        _plan(options),
                        training.task,
                        progress,
                        facts=training.facts,
                        records=watch.records,
                        on_end=lambda headline: print(json.dumps(headline)) if options.report.json else None,
                    )
                    check_coverage(swarm.statistics, options.calls.max_skipped)
                    return headline
            except (CheckpointError, OSError) as error:
                raise CommandFailed(one_line(error)) from error
            # What stays wrong ends the run: dropping step after step would not end.
            except (RouterError, FloatingPointError, TooFewExperts, BaseExceptionGroup) as error:
                leaf = first_leaf(error)
                if not isinstance(leaf, RouterError | FloatingPointError | TooFewExperts):
                    raise
                step = 0 if facts.engine is None else facts.engine.step
                raise CommandFailed(f"{one_line(leaf)}; stopped at step {step}") from error


def _plan(options: TrainOptions) -> Plan:
    length = options.run_length
    return Plan(
        steps=length.steps,
        eval_every=length.eval_every,
        eval_items=length.eval_tokens,
        final_eval_items=length.final_eval_tokens,
        checkpoint_every=length.checkpoint_every,
        max_s=60 * length.max_minutes or math.inf,
    )


@asynccontextmanager
async def _opened_trainers(
    options: TrainOptions, swarm: Swarm, training: Training, progress: TrainingProgress, watch: Watching
) -> AsyncIterator[tuple[Trainers[Any], _Figures]]:
    """The trainers of this process, caught up with others that are ahead, and the headline's figures of averaging."""
    averaging, seed, max_step = options.averaging, options.data.chance_seed, options.run_length.steps
    model, batches = training.model, training.batches
    figures: _Figures = dict
    with mistakes_in_one_line():
        optimizer = averaging.wrap(trunk_optimizer(options))
        # --seed decides the parameters, which all processes share; the rest of chance is each one's own.
        params = model.init(jax.random.key(options.data.seed))
    async with AsyncExitStack() as stack:
        trainers: Trainers[Any]
        if averaging.target_batch_size:
            assert averaging.kind != "noloco"  # refused by `check`
            collaborating = swarm.collaborate(
                model,
                optimizer,
                batches,
                target_batch_size=averaging.target_batch_size,
                average=averaging.kind,
                outer=averaging.outer_optimizer(),
                name=averaging.meeting.name,
                params=params,
                seed=seed,
                config=averaging.collaboration(),
                on_step=watch.averaged,
            )
            trainers = together = await stack.enter_async_context(collaborating)
            if together.step:
                progress.say(f"took the state of a process that was ahead: step {together.step}")
            nursery = await stack.enter_async_context(background_nursery())
            nursery.start_soon(_show_swarm, together.peer, averaging.target_batch_size, progress)
            watch.collaboration(together.peer)
            figures = together.peer.totals.headline
        else:
            trainers = alone = swarm.trainer(model, optimizer, batches, params=params, seed=seed)
            if averaging.average_every:
                opened = open_trunk_averaging(
                    swarm.peer,
                    alone.trunk,
                    name=averaging.meeting.name,
                    config=replace(averaging.config(), meaning=model.meaning),
                    max_step=max_step,
                    device=swarm.device,
                    on_round=watch.averaged,
                )
                averager = await stack.enter_async_context(opened)
                if await alone.trunk.catch_up(min_lead=averaging.average_every, max_step=max_step):
                    progress.say(f"took the state of a process that was ahead: step {alone.trunk.step}")
                elif averager.why_not:
                    progress.say(f"{averager.why_not}; training alone until then")
                figures = averager.totals.headline
        watch.steps_of(trainers)
        yield trainers, figures


async def _show_swarm(peer: Collaboration, target: int, progress: TrainingProgress) -> None:
    """Show the whole swarm's progress, every second."""
    while True:
        facts = peer.facts()
        text = f"swarm: {facts['gathered']:,} of {target:,} from {facts['peers']}, {facts['samples_per_s']:,.0f}/s"
        progress.note(text + (f", last averaged in {facts['averaged_s']:.1f} s" if facts["averaged_s"] else ""))
        await trio.sleep(1)


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
    """Flags that make our model fit their experts."""
    theirs, ours = len(error.theirs), len(error.ours)
    if theirs == ours:
        return "--d-model, --num-heads, --seq-len and --mem-len as on the nodes"
    if theirs > ours:
        return "--dropout, --attention-dropout or --position-dropout above 0: the nodes' experts take dropout keys"
    return "no --dropout, --attention-dropout or --position-dropout: the nodes' experts take no dropout keys"


class _Facts:
    """Facts that this trainer tells the swarm, for `dmoe status`."""

    def __init__(self) -> None:
        self.engine: SwarmEngine | None = None
        """The run's engine; None until there are experts."""
        self._before: tuple[float, Totals] | None = None

    def now(self) -> dict[str, Any]:
        """State, step, loss, items a second and balance of the load since the last time, and failed calls."""
        engine = self.engine
        if engine is None:
            return {"state": "waiting", "step": 0}
        now, totals, loss = time.monotonic(), engine.totals(), engine.last_loss
        state = "compiling" if loss is None else "training"
        facts: dict[str, Any] = {"state": state, "step": engine.step, "failed_calls": totals.calls_failed}
        if loss is not None and math.isfinite(loss):
            facts["loss"] = loss
        if self._before is not None and now > self._before[0]:
            before = self._before[1]
            facts["items_per_s"] = (totals.items - before.items) / (now - self._before[0])
            windows = [balance(uids, totals, before) for uids in engine.layers.values()]
            figures = {
                "load_entropy": mean_balance(windows)["load_entropy"] if windows else None,
                "bias_range": trunk_bias_range(engine.state()),
            }
            facts |= {name: figure for name, figure in figures.items() if figure is not None}
        self._before = now, totals
        return facts
