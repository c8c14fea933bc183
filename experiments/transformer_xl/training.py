"""A model of the experiment in its own run folder: the engine, the plan, and the settings that must not change."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmoe_jax.checkpoints import CheckpointError
from dmoe_jax.cli.common import UsageError, mistakes_in_one_line
from dmoe_jax.data.corpora import Corpus
from dmoe_jax.routing.check import check_router
from dmoe_jax.routing.registry import make_router
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.training.engine import Engine
from dmoe_jax.training.plan import Plan
from dmoe_jax.training.progress import TrainingProgress
from dmoe_jax.training.run import train, train_without_waiting
from dmoe_jax.training.saving import prepare_run
from dmoe_jax.training.task import language_task
from experiments.transformer_xl.local import LocalEngine
from experiments.transformer_xl.names import Model, Place
from experiments.transformer_xl.presets import PRESETS, Preset, count_parameters
from experiments.transformer_xl.settings import MAY_DIFFER, QUICK_EVAL_TOKENS, QUICK_PAUSES, TransformerXLSettings
from experiments.transformer_xl.setup import Setup
from experiments.transformer_xl.simulated import SimulatedDmoe
from experiments.transformer_xl.simulated_dense import SimulatedDense
from experiments.transformer_xl.stretches import Setting


def check(settings: TransformerXLSettings) -> None:
    """Try the router before anything is trained or written, if one of the models has any.

    Raises:
      ValueError: naming the router.
    """
    for preset in (PRESETS[model, settings.size] for model in settings.models):
        if preset.grid_size:
            check_router(make_router(settings.router, preset.grid_size), preset.grid_size, preset.d_model)


def open_folder(settings: TransformerXLSettings, name: str) -> RunFolder:
    """Open the folder of all models.

    Raises:
      ValueError, OSError: as of `prepare_run`.
    """
    fields = {key: value for key, value in dataclasses.asdict(settings).items() if key not in ("out", "resume", "json")}
    fields = {"experiment": name, **fields}
    # In a swarm of processes each trainer looks at its own settings.
    may_differ = tuple(fields) if settings.where == "swarm" else MAY_DIFFER
    return prepare_run(settings.out, fields, name=name, resume=settings.resume, may_differ=may_differ).begin()


def make_engine(setup: Setup, where: Place, *, batch_size: int | None = None, setting: Setting | None = None) -> Engine:
    """An engine at its beginning.

    Args:
      setup: the model, its text and its optimisers.
      where: on this device, or simulated.
      batch_size: sequences of a step; None: the preset's on one device, the setting's for each simulated trainer.
      setting: of the simulated swarm; None: the paper's.

    Raises:
      ValueError: a router that does not keep to its contract, or sizes that do not fit each other or the text.
    """
    if where == "local":
        return LocalEngine(setup, batch_size or setup.preset.batch_size)
    return (SimulatedDmoe if setup.layers else SimulatedDense)(setup, _setting(setting, batch_size))


def make_plan(
    preset: Preset, *, steps: int, eval_every: int | None = None, eval_tokens: int, final_eval_tokens: int = 0
) -> Plan:
    """The plan of a run of the preset.

    Args:
      preset: the model.
      steps: updates of the whole run.
      eval_every: updates between two pauses; None: as often as the preset says.
      eval_tokens, final_eval_tokens: words of the evaluations on the way and at the end; 0 for all.
    """
    return Plan(
        steps=steps,
        eval_every=math.ceil(steps / preset.pauses) if eval_every is None else eval_every,
        eval_items=eval_tokens,
        final_eval_items=final_eval_tokens,
        pause=True,
    )


def run_settings(
    setup: Setup,
    plan: Plan,
    where: Place,
    *,
    router: str | None = None,
    batch_size: int | None = None,
    setting: Setting | None = None,
) -> Mapping[str, object]:
    """All that decides what a run computes, for its folder.

    Args: as of `make_engine`; router: how it was asked for.
    """
    preset = setup.preset
    fields = dataclasses.asdict(preset)
    if not preset.grid_size:
        # What would train experts decides nothing in a model without any.
        fields = {name: value for name, value in fields.items() if not name.startswith("expert_")}
    settings: dict[str, object] = {
        **fields,
        "where": where,
        "corpus": setup.corpus.name,
        "vocab_size": len(setup.corpus.vocabulary),
        "steps": plan.steps,
        "eval_every": plan.eval_every,
        "eval_tokens": plan.eval_items,
        "final_eval_tokens": plan.final_eval_items,
        "seed": setup.seed,
        "compute_dtype": setup.compute_dtype,
    }
    if preset.grid_size:
        settings["router"] = router
    if where == "simulated":
        return settings | dataclasses.asdict(_setting(setting, batch_size))
    return settings | {"batch_size": batch_size or preset.batch_size}


def train_in_folder(
    setup: Setup,
    plan: Plan,
    path: Path,
    *,
    where: Place,
    router: str | None = None,
    batch_size: int | None = None,
    setting: Setting | None = None,
    resume: bool = False,
) -> None:
    """Train a model in its run folder to the end of the plan, or go on with it; nothing to do if it is finished.

    Raises:
      UsageError: for a folder, checkpoint or setting that will not do. KeyboardInterrupt, FloatingPointError,
        RouterError, NetError: as of `dmoe_jax.training.run.train`.
    """
    sizes: dict[str, Any] = {"batch_size": batch_size, "setting": setting}
    with mistakes_in_one_line():
        settings = run_settings(setup, plan, where, router=router, **sizes)
        run = prepare_run(path, settings, resume=resume)
        if run.headline is not None:
            return
        progress = TrainingProgress(plan.steps)
        progress.say(f"{setup.title}: {plan.steps} updates, {where}")
        engine = make_engine(setup, where, **sizes)
    facts: dict[str, Any] = {"model": setup.preset.model, "where": where, "seed": setup.seed}
    if setup.layers and setup.router is not None:
        facts["router"] = setup.router.name
    facts["parameters"] = count_parameters(setup.config, setup.router)
    task = language_task(setup.corpus, splits=("valid", "test"))
    try:
        train_without_waiting(train(engine, run, plan, task, progress, facts=facts))
    except CheckpointError as error:
        raise UsageError(str(error)) from error


def train_model(settings: TransformerXLSettings, model: Model, corpus: Corpus, path: Path) -> None:
    """Train one model in its own run folder, or go on with it, to its end. Raises as `train_in_folder`."""
    preset = PRESETS[model, settings.size]
    eval_tokens, eval_every = settings.eval_tokens, settings.eval_every
    steps = settings.num_steps(preset.steps, preset.simulated_steps)
    if settings.quick:
        eval_tokens = min(eval_tokens or QUICK_EVAL_TOKENS, QUICK_EVAL_TOKENS)
        eval_every = eval_every or max(1, steps // QUICK_PAUSES)
    with mistakes_in_one_line():
        setup = Setup(
            preset=preset,
            corpus=corpus,
            steps=steps,
            seed=settings.seed,
            router=make_router(settings.router, preset.grid_size) if preset.grid_size else None,
            compute_dtype=settings.compute_dtype,
        )
        setting = Setting(num_trainers=settings.trainers, delay_s=settings.delay_s, failure_rate=settings.failure_rate)
        plan = make_plan(
            preset,
            steps=steps,
            eval_every=eval_every,
            eval_tokens=eval_tokens,
            final_eval_tokens=QUICK_EVAL_TOKENS if settings.quick else 0,
        )
    train_in_folder(
        setup,
        plan,
        path,
        where=settings.place,
        router=settings.router,
        batch_size=settings.batch_size,
        setting=setting,
        resume=settings.resume,
    )


def _setting(setting: Setting | None, batch_size: int | None) -> Setting:
    setting = Setting() if setting is None else setting
    return setting if batch_size is None else dataclasses.replace(setting, batch_size=batch_size)
