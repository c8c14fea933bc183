"""A model of the experiment in its own run folder: from the settings to the engine, the plan, and the run."""

import dataclasses
import math
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from dmoe_jax.data.corpora import Corpus, load_corpus
from dmoe_jax.layer_config import Route
from dmoe_jax.machine.disk import CheckpointError, FolderInUse
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.routing.base import Router, RouterError
from dmoe_jax.routing.check import check_router
from dmoe_jax.routing.registry import make_router
from dmoe_jax.runs.endings import UsageError, mistakes_in_one_line, one_line
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.trainer import first_leaf
from dmoe_jax.training.prepared_run import CHECKPOINT_FOLDER, finished_headline, prepare_run
from dmoe_jax.training.progress import TrainingProgress
from dmoe_jax.training.run import Plan, train, train_without_waiting
from dmoe_jax.training.task import language_task
from dmoe_net.errors import NetError
from experiments.bench import Run
from experiments.transformer_xl.emulated import EmulatedDmoe
from experiments.transformer_xl.local import LocalEngine
from experiments.transformer_xl.presets import Preset, chosen_preset
from experiments.transformer_xl.settings import QUICK_PAUSES, Model, Place, TrainingSettings
from experiments.transformer_xl.setup import Setting, Setup
from experiments.transformer_xl.simulated import SimulatedDense, SimulatedEngine
from experiments.transformer_xl.simulated_dmoe import SimulatedDmoe
from experiments.transformer_xl.trainings import Training

FAILURES = (FloatingPointError, RouterError, NetError)
"""Errors with which a run may fail."""


def checked_router(spec: str, config: TransformerXLConfig, route: Route = "sequence") -> Router:
    """The router for a mixture of these sizes that routes sequences or tokens, tried on a few samples.

    Raises:
      RouterError: naming the router.
    """
    router = make_router(spec, config.grid_size)
    check_router(router, config.grid_size, config.d_model, in_order=route == "token")
    return router


def open_folder(settings: TrainingSettings, name: str) -> RunFolder:
    """Open the folder of all models.

    Raises:
      ValueError, OSError: as of `prepare_run`.
    """
    fields = dataclasses.asdict(settings)
    fields = {"experiment": name} | {key: fields[key] for key in fields if key not in ("out", "resume", "json")}
    # In a swarm of processes each trainer looks at its own settings.
    may_differ = tuple(fields) if settings.place == "swarm" else settings.may_differ
    return prepare_run(settings.out, fields, name=name, resume=settings.resume, may_differ=may_differ).begin()


def open_corpus(run: Run[Any]) -> Corpus:
    """Load the text that the settings ask for by `data`, and say so.

    Raises:
      UsageError: it cannot be had.
    """
    with mistakes_in_one_line():
        corpus = load_corpus(source=run.settings.data)
    run.log("corpus", name=corpus.name, description=corpus.description)
    run.say(f"corpus: {corpus.description}")
    run.say(f"run folder: {run.folder.path}")
    return corpus


ModelEngine = LocalEngine | SimulatedEngine | EmulatedDmoe


def _simulated(setup: Setup) -> SimulatedEngine:
    return SimulatedDmoe(setup) if setup.layers else SimulatedDense(setup)


ENGINES: Mapping[Place, Callable[[Setup], ModelEngine]] = {
    "local": LocalEngine,
    "simulated": _simulated,
    "emulated": EmulatedDmoe,
}
"""Place where a model trains -> maker of its engine at its beginning."""


def make_engine(setup: Setup) -> ModelEngine:
    """An engine at its beginning.

    Raises:
      ValueError: a router that does not keep to its contract, or sizes that do not fit each other or the text.
    """
    return ENGINES[setup.where](setup)


def make_plan(settings: TrainingSettings, preset: Preset) -> Plan:
    """The plan of a run of the preset: the updates, and the pauses for evaluation and checkpoint.

    Every point of its curve is over the same `eval_items` words; the final figures are over both whole texts.
    """
    steps = settings.steps or (preset.simulated_steps if settings.is_asynchronous else preset.steps)
    pauses, eval_tokens, final_eval_tokens = preset.pauses, settings.eval_tokens, settings.final_eval_tokens
    if settings.quick:
        steps, pauses = min(steps, settings.quick_steps[settings.place]), QUICK_PAUSES
        eval_tokens = min(eval_tokens or settings.quick_eval_tokens, settings.quick_eval_tokens)
        final_eval_tokens = eval_tokens
    return Plan(
        steps=steps,
        eval_every=settings.eval_every or math.ceil(steps / pauses),
        eval_items=eval_tokens,
        final_eval_items=final_eval_tokens,
        pause=True,
    )


def run_settings(setup: Setup, plan: Plan, router: str | None) -> Mapping[str, object]:
    """All that decides what a run computes, for its folder.

    Args:
      router: how it was asked for.
    """
    settings: dict[str, object] = {
        "model": setup.preset.model,
        "where": setup.where,
        "corpus": setup.corpus.name,
        "config": setup.config,
        "unigram_biases": setup.preset.unigram_biases,
        "recipe": setup.recipe,
        "batch_size": setup.rows,
        "eval_batch_size": setup.preset.eval_batch_size,
        "plan": plan,
        "seed": setup.seed,
        "swarm": setup.setting,
    }
    return settings | ({"router": router, "expert_recipe": setup.expert_recipe} if setup.layers else {})


def train_in_folder(setup: Setup, plan: Plan, path: Path, *, router: str | None = None, resume: bool = False) -> None:
    """Train a model in its run folder to the end of the plan, or go on with it; nothing to do if it is finished.

    Args:
      router: how it was asked for.

    Raises:
      UsageError: for a folder, checkpoint or setting that will not do. KeyboardInterrupt, FloatingPointError,
        RouterError, NetError: as of `dmoe_jax.training.run.train`.
    """
    with mistakes_in_one_line():
        run = prepare_run(path, run_settings(setup, plan, router), resume=resume)
        if run.headline is not None:
            return
        progress = TrainingProgress(plan.steps)
        progress.say(f"{setup.title}: {plan.steps} updates, {setup.where}")
        engine = make_engine(setup)
    facts: dict[str, object] = {"model": setup.preset.model, "where": setup.where, "seed": setup.seed}
    if setup.router is not None:
        facts["router"] = setup.router.name
    facts["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(engine.params()))
    task = language_task(setup.corpus, splits=("valid", "test"))
    try:
        train_without_waiting(train(engine, run, plan, task, progress, facts=facts))
    except (CheckpointError, FolderInUse) as error:
        raise UsageError(str(error)) from error


def make_setup(
    settings: TrainingSettings, corpus: Corpus, *, model: Model, seed: int, router: str = "", name: str = ""
) -> Setup:
    """The model that the settings ask for.

    Args:
      router: how that of a mixture is asked for.
      name: what figures call the model; empty: its own name.

    Raises:
      ValueError: the settings do not fit each other.
    """
    preset = chosen_preset(settings, model)
    setting = Setting(
        # A dense model has no swarm that could be emulated.
        place="emulated" if settings.place == "emulated" and preset.config.is_mixture else "simulated",
        num_trainers=settings.trainers,
        concurrency=settings.concurrency,
        delay_s=settings.delay_s,
        failure_rate=settings.failure_rate,
        slow_node=settings.slow_node,
    )
    return Setup(
        preset=preset,
        corpus=corpus,
        steps=make_plan(settings, preset).steps,
        seed=seed,
        router=make_router(router, preset.config.grid_size) if preset.config.is_mixture else None,
        route=settings.route,
        name=name,
        compute_dtype=settings.compute_dtype,
        setting=None if settings.place == "local" else setting,
        batch_size=settings.batch_size,
        staleness_power=settings.staleness_power,
    )


def train_model(
    settings: TrainingSettings,
    corpus: Corpus,
    path: Path,
    *,
    model: Model,
    seed: int,
    router: str = "",
    name: str = "",
) -> None:
    """Train one model in its own run folder, or go on with it. Args: as of `make_setup`.

    Raises: as `train_in_folder`.
    """
    with mistakes_in_one_line():
        setup = make_setup(settings, corpus, model=model, seed=seed, router=router, name=name)
        plan = make_plan(settings, setup.preset)
    train_in_folder(setup, plan, path, router=router, resume=settings.resume)


def carry_out(training: Training, corpus: Corpus) -> None:
    """Train the one model of a training in its folder. Raises as `train_model`, but not what it may fail by."""
    own = training.settings
    assert own.out is not None
    (model,) = own.model
    try:
        train_model(own, corpus, own.out, model=model, seed=own.seed, router=own.router, name=training.label)
    except Exception as error:
        expected, others = BaseExceptionGroup("", [error]).split(FAILURES)
        if not training.may_fail or expected is None or others is not None:
            raise
        print(f"{training.label} failed: {one_line(first_leaf(expected))}", file=sys.stderr)
        return
    if not training.keeps_checkpoints and finished_headline(RunFolder(own.out)) is not None:
        shutil.rmtree(own.out / CHECKPOINT_FOLDER, ignore_errors=True)
