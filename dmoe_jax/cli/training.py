"""One run of `dmoe train`: the model and its trainers as the flags say, then the run loop."""

import json
import math
from contextlib import nullcontext
from typing import Any

from dmoe_jax.cli.language_training import language_training
from dmoe_jax.cli.train_options import TrainOptions
from dmoe_jax.cli.trained_models import own_training
from dmoe_jax.cli.trainers import opened_engine
from dmoe_jax.cli.watching import watching
from dmoe_jax.machine.disk import CheckpointError
from dmoe_jax.metrics.monitor import Monitor
from dmoe_jax.mixture.statistics import TooFewExperts, check_coverage
from dmoe_jax.routing.base import RouterError
from dmoe_jax.runs.endings import CommandFailed, TryAgain, failure_of, mistakes_in_one_line, one_line
from dmoe_jax.swarm.swarm import Swarm
from dmoe_jax.trainer import first_leaf
from dmoe_jax.training.prepared_run import PreparedRun
from dmoe_jax.training.progress import TrainingProgress
from dmoe_jax.training.run import Plan, train


async def run_training(
    options: TrainOptions, run: PreparedRun | None, swarm: Swarm, monitor: Monitor | None = None
) -> dict[str, Any]:
    """Train as the flags say; the headline. Without a run: do as process 0 of a replica does, quietly. If cancelled,
    the run folder still gets its figure, report and a checkpoint of what was reached, and a trace is written.

    Raises:
      UsageError: for data, a checkpoint or a setting that will not do, or when training goes wrong beyond help: then
        after the report. NetError: no experts, or no swarm.
    """
    settings, devices, length = repr(options.settings()), options.trunk.devices, options.run_length
    plan = Plan(
        steps=length.steps,
        eval_every=length.eval_every,
        eval_items=length.eval_tokens,
        final_eval_items=length.final_eval_tokens,
        pause=devices.distributed is not None,
        checkpoint_every=length.checkpoint_every,
        max_s=60 * length.max_minutes or math.inf,
    )
    with (
        TrainingProgress(options.run_length.steps, quiet=run is None) as progress,
        watching(swarm, monitor or Monitor("train"), options.report.trace, progress.say) as watch,
    ):
        for change in () if run is None else run.changes:
            progress.say(f"going on with another setting than before: {change}")
        # Listed from the beginning: `dmoe status` shows who waits and compiles, too.
        async with nullcontext() if run is None else swarm.announced("trainer", watch.facts):
            training = await (
                language_training(options, swarm, progress) if options.model is None else own_training(options, swarm)
            )
            progress.unit = training.task.unit
            if run is not None:
                with mistakes_in_one_line():
                    run.check_meaning(training.task.meaning)
            await training.wait_for_experts(options.calls.wait_s, progress)
            watch.found_experts()
            headline: dict[str, Any] = {}
            try:
                async with opened_engine(options, run, swarm, training, progress, watch) as engine:
                    if run is None:
                        await devices.follow(engine, swarm.peer, settings=settings)
                        return headline
                    watch.begins(engine, training.task.unit)
                    async with devices.opened_lead(engine, swarm.peer, settings=settings) as lead:
                        headline = await train(
                            lead,
                            run,
                            plan,
                            training.task,
                            progress,
                            facts=training.facts,
                            records=watch.records,
                            on_end=lambda headline: print(json.dumps(headline)) if options.report.json else None,
                        )
                    check_coverage(swarm.statistics, options.calls.max_skipped)
                    return headline
            except (CheckpointError, OSError) as error:
                raise failure_of(error) from error
            # What stays wrong ends the run: dropping step after step would not end.
            except (RouterError, FloatingPointError, TooFewExperts, BaseExceptionGroup) as error:
                leaf = first_leaf(error)
                if not isinstance(leaf, RouterError | FloatingPointError | TooFewExperts):
                    raise
                # Experts may come back; numbers that are not finite, or a router's mistake, would come again. Started
                # again, a run that has come to its end would end at once and look like a good one.
                failure = TryAgain if isinstance(leaf, TooFewExperts) and not headline else CommandFailed
                raise failure(f"{one_line(leaf)}; stopped at step {watch.step}") from error
