"""A model of the experiment in its own run folder: from the settings to the engine, the plan, and the run."""

import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from dmoe_jax.autodiff import without_waiting
from dmoe_jax.data import Corpus, load_corpus
from dmoe_jax.layer_config import Route
from dmoe_jax.machine.disk import CheckpointError, FolderInUse
from dmoe_jax.machine.environment import NO_FLAGS, PREFIX, SECRET_VARIABLE
from dmoe_jax.models import TransformerXLConfig
from dmoe_jax.routing import Router, RouterError, check_router, make_router
from dmoe_jax.runs.endings import CommandFailed, failure_of, mistakes_in_one_line, one_line
from dmoe_jax.runs.flags import as_flags, words_of
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.trainer import first_leaf
from dmoe_jax.training.prepared_run import CHECKPOINT_FOLDER, finished_headline, prepare_run
from dmoe_jax.training.progress import TrainingProgress
from dmoe_jax.training.run import Plan, train
from dmoe_jax.training.task import language_task
from dmoe_net.errors import NetError
from experiments.bench import Run
from experiments.transformer_xl.asynchronous import EmulatedDmoe, SimulatedEngine
from experiments.transformer_xl.local import LocalEngine
from experiments.transformer_xl.presets import Preset, chosen_preset, model_config
from experiments.transformer_xl.settings import QUICK_PAUSES, TrainingSettings, TransformerXLSettings
from experiments.transformer_xl.setup import BestValidation, Setup
from experiments.transformer_xl.trainings import Training

FAILURES = (FloatingPointError, RouterError, NetError)
"""Errors with which a run may fail."""

_OF_SLOW_TRAINERS = ("trainers", "delay_s", "failure_rate", "slow_node", "concurrency")

_NODES, _PROCESSES, _TRAINERS = 4, 2, 2
"""Expert nodes, trainer processes, and asynchronous trainers in each of those."""

_QUICK_MINUTES = 0.8
"""After these a quick run stops even if there are updates left."""


def checked_router(spec: str, config: TransformerXLConfig, route: Route = "sequence") -> Router:
    """The router for a mixture of these sizes that routes sequences or tokens, tried on a few samples. Raises
    RouterError, naming the router."""
    router = make_router(spec, config.grid_size)
    check_router(router, config.grid_size, config.d_model, in_order=route == "token")
    return router


def open_corpus(run: Run[Any]) -> Corpus:
    """Load the text that the settings ask for by `data`, and say so. Raises UsageError if it cannot be had."""
    with mistakes_in_one_line():
        corpus = load_corpus(source=run.settings.data)
    run.log("corpus", name=corpus.name, description=corpus.description)
    run.say(f"corpus: {corpus.description}")
    run.say(f"run folder: {run.folder.path}")
    return corpus


def make_engine(setup: Setup) -> LocalEngine | SimulatedEngine | EmulatedDmoe:
    """A model's engine in its place, at its beginning. Raises ValueError: of the router, or sizes that do not fit."""
    if setup.where == "local":
        return LocalEngine(setup)
    return EmulatedDmoe(setup) if setup.where == "emulated" else SimulatedEngine(setup)


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


def make_setup(training: Training, corpus: Corpus) -> Setup:
    """The one model of a training. Raises ValueError if the settings do not fit each other."""
    settings = training.settings
    (model,) = settings.model
    preset = chosen_preset(settings, model)
    return Setup(
        preset=preset,
        corpus=corpus,
        steps=make_plan(settings, preset).steps,
        seed=settings.seed,
        router=make_router(settings.router, preset.config.grid_size) if preset.config.is_mixture else None,
        name=training.label,
        settings=settings,
    )


def train_in_folder(setup: Setup, plan: Plan, path: Path, *, router: str | None = None, resume: bool = False) -> None:
    """Train a model in its run folder to the end of the plan, or go on with it; nothing to do if it is finished.

    Args:
      router: how it was asked for.

    Raises:
      UsageError: for a folder, checkpoint or setting that will not do. KeyboardInterrupt, FloatingPointError,
        RouterError, NetError: as of `dmoe_jax.training.run.train`.
    """
    facts: dict[str, object] = {"model": setup.preset.model, "where": setup.where, "seed": setup.seed}
    slow = {name: getattr(setup.settings, name) for name in _OF_SLOW_TRAINERS if setup.settings.is_asynchronous}
    decisive = {
        **facts,
        "corpus": setup.corpus.name,
        "config": setup.config,
        "unigram_biases": setup.preset.unigram_biases,
        "recipe": setup.recipe,
        "expert_recipe": setup.expert_recipe if setup.layers else None,
        "router": router,
        "batch_size": setup.rows,
        "slow_trainers": slow,
        "plan": plan,
    }
    with mistakes_in_one_line():
        run = prepare_run(path, decisive, resume=resume)
        if run.headline is not None:
            return
        progress = TrainingProgress(plan.steps)
        progress.say(f"{setup.name or setup.preset.model}: {plan.steps} updates, {setup.where}")
        engine = BestValidation(make_engine(setup))
    facts |= {} if setup.router is None else {"router": setup.router.name}
    facts["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(engine.params()))
    task = language_task(setup.corpus, splits=("valid", "test"))
    try:
        without_waiting(train(engine, run, plan, task, progress, facts=facts))
    except (CheckpointError, FolderInUse) as error:
        raise failure_of(error) from error


def up_flags(settings: TransformerXLSettings, preset: Preset, plan: Plan, out: Path) -> list[str]:
    """Flags of `dmoe up` for the preset, with the step sizes of the run, and the first trainer process's run folder."""
    config = model_config(preset, preset.config.vocab_size, settings)
    sizes = ("num_layers", "grid_size", "cutoffs", "route", "embedding_dropout", "input_dropout", "output_dropout")
    rates = ("learning_rate", "warmup_steps", "weight_decay", "grad_clip", "staleness_power")
    of_nodes = as_flags({name: getattr(preset.expert_recipe, name) for name in rates})
    values = {
        "out": out,
        "nodes": _NODES,
        "trainers": _PROCESSES,
        "num_trainers": _TRAINERS,
        "batch_size": settings.batch_size or max(1, preset.batch_size // (_PROCESSES * _TRAINERS)),
        "data": settings.data,
        "seed": settings.seed,
        "router": settings.router,
        "steps": plan.steps,
        "max_minutes": _QUICK_MINUTES if settings.quick else 0.0,
        "eval_every": plan.eval_every,
        "checkpoint_every": plan.eval_every,
        "eval_tokens": plan.eval_items,
        "final_eval_tokens": plan.final_eval_items,
        "learning_rate_floor": preset.recipe.floor,
        **{name: getattr(config, name) for name in sizes},
        **{name: getattr(preset.recipe, name) for name in rates},
    }
    # A blank first: `dmoe up --resume` reads the words that it was given anew, and takes a -- at once for a flag.
    handed_on = [f"--node-flags= {shlex.join(of_nodes)}", f"--train-flags= --k-best {config.k_best}"]
    return [*as_flags(values), *words_of(config.layer), *handed_on]


def train_in_swarm(settings: TransformerXLSettings, preset: Preset, plan: Plan, out: Path) -> None:
    """Train over processes of this machine: a DHT peer, nodes, and two trainer processes whose trunks are averaged.

    The first trainer process has the folder, or goes on in it; the other's folder, the nodes' checkpoints and the logs
    lie beside it. Nodes know of no end of the run: step sizes of experts stay where the warm-up has brought them.

    Raises:
      KeyboardInterrupt: once all processes have ended, the nodes with their experts saved.
      CommandFailed: the command has said why.
    """
    command = [sys.executable, "-m", "dmoe_jax.cli", "up", *up_flags(settings, preset, plan, out)]
    if settings.resume and out.with_name(f"{out.name}.logs").is_dir():
        command.append("--resume")
    # Flags that the user's variables stand for, and the secret, are for another swarm.
    kept = {name: value for name, value in os.environ.items() if name in NO_FLAGS or not name.startswith(PREFIX)}
    process = subprocess.Popen(
        [*command, "--exit-on-stdin-eof"],
        stdin=subprocess.PIPE,
        stdout=2,
        env={**kept, SECRET_VARIABLE: ""},
        start_new_session=True,
    )
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    if status:
        raise CommandFailed(f"dmoe up ended with status {status}; it has said why above")


def carry_out(training: Training, corpus: Corpus) -> None:
    """Train the one model of a training in its folder, or go on with it.

    Raises: as `train_in_folder`, but not what it may fail by.
    """
    own = training.settings
    assert own.out is not None
    try:
        with mistakes_in_one_line():
            setup = make_setup(training, corpus)
            plan = make_plan(own, setup.preset)
        if own.place != "swarm":
            router = own.router if setup.router else None
            train_in_folder(setup, plan, own.out, router=router, resume=own.resume)
        elif finished_headline(RunFolder(own.out)) is None:
            train_in_swarm(own, setup.preset, plan, own.out)
    except Exception as error:
        expected, others = BaseExceptionGroup("", [error]).split(FAILURES)
        if not training.may_fail or expected is None or others is not None:
            raise
        print(f"{training.label} failed: {one_line(first_leaf(expected))}", file=sys.stderr)
        return
    if not training.keeps_checkpoints and finished_headline(RunFolder(own.out)) is not None:
        shutil.rmtree(own.out / CHECKPOINT_FOLDER, ignore_errors=True)
