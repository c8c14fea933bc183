"""Training: a run for each router and seed, in a folder each, then one report of all."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dmoe_jax.cli.progress import TrainingProgress
from rich.console import Console

from dmoe_jax.checkpoints import CheckpointError
from dmoe_jax.cli.common import UsageError, one_line
from dmoe_jax.data.corpora import Corpus, load_corpus
from dmoe_jax.routing.base import Router, RouterError
from dmoe_jax.routing.check import check_router
from dmoe_jax.routing.registry import ROUTERS, make_router
from experiments.compare_routers.report import print_table, report, run_name
from experiments.compare_routers.run import CompareRoutersCommand
from experiments.transformer_xl.assembly import headline_facts, make_engine, make_plan, run_settings
from experiments.transformer_xl.driver import train
from experiments.transformer_xl.names import Place
from experiments.transformer_xl.presets import PRESETS
from experiments.transformer_xl.resuming import finished_headline, open_parent, open_run
from experiments.transformer_xl.stretches import Setting
from net.errors import NetError

_QUICK_ROUTERS = ("product_key", "switch", "uniform_random")
"""One that learns and is additive, one that learns and balances its load, and the bar: one that knows nothing."""

_QUICK_STEPS: Mapping[Place, int] = {"local": 20, "simulated": 32}
"""Updates of each run of a quick comparison."""

_QUICK_PAUSES = 4
"""Pauses of each of them: a pause ends the work of a swarm, and takes as long as several updates."""

_QUICK_EVAL_TOKENS = 4096
"""Words of each of its evaluations, the last ones too."""


def compare_routers(command: CompareRoutersCommand) -> dict[str, Any]:
    """Train every router with every seed, in a run folder each; the headline of all.

    All routers are trained with the first seed before the second one begins, so that a comparison that was interrupted
    has something to compare. A run that fails is written down and does not stop the others.

    Raises:
      UsageError: for a router, corpus, folder, checkpoint or setting that will not do. KeyboardInterrupt: after the
        report of the runs that were finished.
    """
    console = Console(stderr=True)
    routers = _checked(lambda: load_routers(command))
    corpus = _checked(lambda: load_corpus(source=command.data))
    settings = {name: value for name, value in asdict(command).items() if name not in ("out", "resume", "json")}
    settings |= {"routers": [spec for spec, _ in routers.values()], "seeds": command.chosen_seeds}
    folder = _checked(
        lambda: open_parent(
            command.out, "compare_routers", settings, resume=command.resume, may_differ=("routers", "seeds")
        )
    )
    console.print(f"corpus: {corpus.description}", highlight=False)
    console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
    failed: list[str] = []
    try:
        runs = [(label, seed) for seed in command.chosen_seeds for label in routers]
        for number, (label, seed) in enumerate(runs, start=1):
            console.print(f"run {number} of {len(runs)}: {label}, seed {seed}", highlight=False)
            spec, router = routers[label]
            try:
                _train(command, corpus, router, spec, seed, folder.path)
            except Exception as error:
                detail = _expected(error)
                failed.append(run_name(label, seed))
                folder.log("event", name="run_failed", detail=f"{failed[-1]}: {detail}")
                console.print(f"{failed[-1]} failed: {detail}", highlight=False, soft_wrap=True)
    finally:
        # Also after Ctrl-C: what was finished is worth its report.
        headline, table = report(
            folder,
            corpus,
            size=command.size,
            where=command.place,
            labels=list(routers),
            seeds=command.chosen_seeds,
            failed=failed,
        )
        if table is not None:
            print_table(table, console)
        console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
    return headline


def load_routers(command: CompareRoutersCommand) -> dict[str, tuple[str, Router]]:
    """Label -> (how it was asked for, the router), each tried on a few samples.

    Raises:
      RouterError: naming the router. ValueError: two of them would share a label or a folder.
    """
    preset = PRESETS["dmoe", command.size]
    routers: dict[str, tuple[str, Router]] = {}
    folders: dict[str, str] = {}
    for spec in command.routers or (_QUICK_ROUTERS if command.quick else tuple(ROUTERS)):
        router = make_router(spec, preset.grid_size)
        check_router(router, preset.grid_size, preset.d_model)
        other = folders.setdefault(run_name(router.name, 0), spec)
        if other != spec:
            raise ValueError(f"routers {other} and {spec} are both called {router.name!r}: rename one of them")
        routers[router.name] = spec, router
    return routers


def _train(command: CompareRoutersCommand, corpus: Corpus, router: Router, spec: str, seed: int, parent: Path) -> None:
    """One run in its own folder: trained to its end, or from its last pause on, or found finished."""
    preset, place = PRESETS["dmoe", command.size], command.place
    steps = command.steps or (preset.steps if place == "local" else preset.simulated_steps)
    eval_tokens, final_eval_tokens = command.eval_tokens, 0
    if command.quick:
        steps = min(steps, _QUICK_STEPS[place])
        eval_tokens = final_eval_tokens = min(eval_tokens or _QUICK_EVAL_TOKENS, _QUICK_EVAL_TOKENS)
    setting = _checked(
        lambda: Setting(num_trainers=command.trainers, delay_s=command.delay_s, failure_rate=command.failure_rate)
    )
    common: dict[str, Any] = {"where": place, "seed": seed, "batch_size": command.batch_size, "setting": setting}
    plan = make_plan(
        preset,
        steps=steps,
        eval_every=command.eval_every or (max(1, steps // _QUICK_PAUSES) if command.quick else None),
        eval_tokens=eval_tokens,
        final_eval_tokens=final_eval_tokens,
    )
    settings = run_settings(preset, corpus, plan, router=spec, **common)
    folder = _checked(lambda: open_run(parent / run_name(router.name, seed), settings, resume=command.resume))
    if finished_headline(folder) is not None:
        return
    engine = _checked(lambda: make_engine(preset, corpus, steps=steps, router=router, name=router.name, **common))
    facts = headline_facts(preset, corpus, where=place, seed=seed, router=router)
    try:
        train(engine, folder, plan, corpus, TrainingProgress(steps), facts=facts)
    except CheckpointError as error:
        raise UsageError(str(error)) from error


def _checked(step: Callable[[], Any]) -> Any:
    """The step's value; what a wrong setting, a damaged file or a full folder raises is the user's to mend."""
    try:
        return step()
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def _expected(error: BaseException) -> str:
    """What went wrong with a run, in one line, if it is what may go wrong with a run; raises anything else."""
    expected, others = BaseExceptionGroup("", [error]).split((FloatingPointError, RouterError, NetError))
    if expected is None or others is not None:
        raise error
    leaf: BaseException = expected
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return one_line(leaf)
