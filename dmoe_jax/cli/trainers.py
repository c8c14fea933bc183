"""Trainers of `dmoe train`: alone, averaging with other processes, or gathering one large batch with them."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.checkpoints import numbers_in
from dmoe_jax.cli.init_flags import fitting, settings_of_model
from dmoe_jax.cli.train_options import LanguageModelOptions, TrainOptions
from dmoe_jax.cli.trained_models import Training, trunk_optimizer
from dmoe_jax.cli.watching import Watching
from dmoe_jax.collaboration import Collaboration
from dmoe_jax.models.transformer_xl import TransformerXL
from dmoe_jax.runs.endings import mistakes_in_one_line
from dmoe_jax.swarm.swarm import Swarm
from dmoe_jax.trained.imported import read_trunk_for
from dmoe_jax.trained.offered import offer_model
from dmoe_jax.trainer import AnyTrainers
from dmoe_jax.training.prepared_run import CHECKPOINT_FOLDER, PreparedRun
from dmoe_jax.training.progress import TrainingProgress
from dmoe_jax.training.swarm_engine import SwarmEngine
from dmoe_jax.training.task import LanguageTask
from dmoe_jax.trunk import open_trunk_averaging
from dmoe_net.nursery import background_nursery


@asynccontextmanager
async def opened_engine(
    options: TrainOptions,
    run: PreparedRun | None,
    swarm: Swarm,
    training: Training,
    progress: TrainingProgress,
    watch: Watching,
) -> AsyncIterator[SwarmEngine]:
    """The engine of this process's trainers, caught up with others that are ahead. Raises UsageError for an optimiser,
    or an export to begin with, that will not do."""
    averaging, seed, max_step = options.averaging, options.data.chance_seed, options.run_length.steps
    model, batches = training.model, training.batches
    figures: Callable[[], Mapping[str, float | int | None]] = dict
    mesh = options.trunk.devices.mesh_of_trunk()
    with mistakes_in_one_line():
        optimizer = averaging.wrap(trunk_optimizer(options))
        # --seed decides the parameters, which all processes share; the rest of chance is each one's own.
        params = model.init(jax.random.key(options.data.seed))
        # A run that goes on has its own, and the export may be gone.
        path = options.folder.out if run is None else run.path
        if options.data.init is not None and not (path and numbers_in(path / CHECKPOINT_FOLDER)):
            reading = partial(_exported_trunk, options.data.init, options.language, training)
            params = await trio.to_thread.run_sync(reading, abandon_on_cancel=True)
    async with AsyncExitStack() as stack:
        trainers: AnyTrainers
        nursery = await stack.enter_async_context(background_nursery())
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
                mesh=mesh,
                seed=seed,
                config=averaging.collaboration(),
                on_step=watch.averaged,
            )
            trainers = together = await stack.enter_async_context(collaborating)
            if together.step:
                progress.say(f"took the state of a process that was ahead: step {together.step}")
            if run is not None:
                nursery.start_soon(_show_swarm, together.peer, averaging.target_batch_size, progress)
                watch.collaboration(together.peer)
            figures = together.peer.totals.headline
        else:
            trainers = alone = swarm.trainer(model, optimizer, batches, params=params, mesh=mesh, seed=seed)
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
        offers = averaging.listens and options.trunk.devices.distributed is None
        if offers and isinstance(model, TransformerXL) and isinstance(training.task, LanguageTask):
            words, name = training.task.corpus.vocabulary, options.language.router

            def state() -> tuple[int, PyTree]:
                return trainers.step, trainers.params

            nursery.start_soon(offer_model, swarm.peer, swarm.name, model.config, name, words, state, swarm.device)
        yield SwarmEngine(trainers, swarm.statistics, training.evaluation, layers=training.layers, figures=figures)


def _exported_trunk(init: Path, language: LanguageModelOptions, training: Training) -> dict[str, Any]:
    """The trunk of an export for this language model. Raises ValueError or UsageError if it is another model's."""
    config, words = cast(Any, training.model).config, training.task.meaning
    with fitting(init, settings_of_model(language)) as path:
        return read_trunk_for(path, config, router=language.router, words=words)


async def _show_swarm(peer: Collaboration, target: int, progress: TrainingProgress) -> None:
    """Show the whole swarm's progress, every second."""
    while True:
        facts = peer.facts()
        text = f"swarm: {facts['gathered']:,} of {target:,} from {facts['peers']}, {facts['samples_per_s']:,.0f}/s"
        progress.note(text + (f", last averaged in {facts['averaged_s']:.1f} s" if facts["averaged_s"] else ""))
        await trio.sleep(1)
