"""The command: train the models on equal numbers of tokens, then compare them."""

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from dmoe_jax.cli.common import UsageError, fail, parse_command_line, set_up_jax
from experiments.transformer_xl.names import Model, Place, Size

_PROG = "transformer_xl"
_EXIT_INTERRUPTED = 130
_ALL_MODELS: tuple[Model, ...] = ("dmoe", "small", "base")

_QUICK_STEPS: Mapping[Place, int] = {"local": 30, "simulated": 160}
"""Updates of each model in a quick run."""

_QUICK_PAUSES = 4
"""Pauses of a quick run."""

_QUICK_EVAL_TOKENS = 8192
"""Words of each of its evaluations, the last ones too."""

_MAY_DIFFER = ("model", "nodes", "processes", "average_every", "join", "jobs", "no_overhead")
"""Flags that a resumed run may change: each model compares the settings that matter to it."""

_HEADLINE = (
    "validation_perplexity",
    "test_perplexity",
    "unigram_perplexity",
    "steps",
    "tokens",
    "tokens_per_s",
    "parameters",
    "training_s",
    "virtual_s",
    "staleness",
    "failed_call_share",
    "steps_lost",
    "load_cv",
    "load_entropy",
    "dead_experts",
    "complete",
)
"""Figures of each model in the headline of all."""


@dataclass(frozen=True, kw_only=True)
class TransformerXLCommand:
    """Train Transformer-XL language models on WikiText-2: a mixture of small layers, the small model, the large one."""

    model: tuple[Model, ...] = ()
    """Models to train: dmoe, small, base. Default: all three (in a swarm of processes: dmoe)."""
    router: str = "product_key"
    """Router of dmoe: a registered name, or my_file.py:my_router."""
    size: Size = "tiny"
    """tiny: minutes on two cores. full: the paper's size, for a large GPU."""
    where: Literal["auto", "local", "simulated", "swarm"] = "auto"
    """local: at once on this device. simulated: 32 slow trainers in virtual time. swarm: real processes on this
    machine, or the swarm given by --join; dmoe only. auto: tiny is simulated, full is local."""
    steps: int | None = None
    """Updates of each model, in a swarm of processes of each trainer process. Default: the preset's."""
    batch_size: int | None = None
    """Sequences of an update. Default: the preset's on one device, 1 for each simulated trainer, for each of the four
    trainers of a swarm of processes a quarter of the preset's."""
    seed: int = 0
    """Seed of everything."""
    bf16: bool = False
    """Multiply matrices of the layers in bfloat16."""
    eval_every: int | None = None
    """Updates between two pauses for evaluation and checkpoint. Default: the preset's."""
    eval_tokens: int = 16_384
    """Validation words of the evaluation in a pause, 0 for all. At the end all are read, and all of the test text."""
    trainers: int = 32
    """Trainers, where simulated."""
    delay_s: float = 1.0
    """Mean of the exponential delay where simulated, virtual seconds."""
    failure_rate: float = 0.1
    """Share of the expert calls in a simulated swarm that are never answered."""
    nodes: int = 4
    """Expert nodes of a swarm of processes."""
    processes: int = 2
    """Trainer processes of a swarm of processes, each with its own trunk; they are averaged."""
    average_every: int = 10
    """Trunk updates of a trainer process between two averages."""
    join: tuple[str, ...] = ()
    """Peers of a running swarm, instead of starting one."""
    data: Literal["auto", "wikitext-2", "embedded"] = "auto"
    """Corpus: auto (DMOE_DATA, cache, download, else the embedded one), wikitext-2, or embedded."""
    out: Path | None = None
    """Run folder; must be new or empty unless --resume. Default: runs/ and the time."""
    jobs: int | None = None
    """Models trained at once, each in a process with its share of the cores. Default: two where simulated and there are
    two cores, else one."""
    resume: bool = False
    """Go on with the run in --out: finished models stay, one that was interrupted goes on from its last pause."""
    quick: bool = False
    """A run of under two minutes on two cores that shows the same things with less training."""
    json: bool = False
    """Print the headline figures as one JSON object on the last line."""
    no_overhead: bool = False
    """Leave out the measurement of what the mixture costs over a dense layer of its FLOPs (where dmoe is local)."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_every", "trainers", "nodes", "processes", "average_every", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.eval_tokens < 0 or self.seed < 0:
            raise ValueError("--eval-tokens and --seed must not be negative")
        if not (self.delay_s >= 0 and 0 <= self.failure_rate < 1):
            raise ValueError("--delay-s must not be negative, --failure-rate from 0 to below 1")
        if len(set(self.model)) < len(self.model):
            raise ValueError(f"--model names a model twice: {' '.join(self.model)}")
        if self.resume and self.out is None:
            raise ValueError("--resume needs --out with the folder of the run to continue")

    @property
    def models(self) -> tuple[Model, ...]:
        """The models to train, in order."""
        return self.model or _ALL_MODELS

    @property
    def place(self) -> Place:
        """Where they train, unless it is a swarm of processes."""
        if self.where == "auto":
            return "simulated" if self.size == "tiny" else "local"
        return cast(Place, self.where)

    @property
    def num_jobs(self) -> int:
        """How many models are trained at once."""
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        default = min(2, num_cores) if self.place == "simulated" else 1
        return min(len(self.models), self.jobs or default)


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    command = parse_command_line(TransformerXLCommand, prog=f"python -m experiments.{_PROG}", args=args)
    with end_with_one_line():
        if command.where == "swarm":
            from experiments.transformer_xl.swarm import run_swarm

            sys.exit(run_swarm(command))
        set_up_jax()
        run_models(command)


@contextmanager
def end_with_one_line() -> Iterator[None]:
    """End this process with one line and the status for it if Ctrl-C, SIGTERM or a user's mistake ends the block.

    Whoever ends a process from outside wants what Ctrl-C gives: a report, and a run that can be resumed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        _exit_after(error)


def _exit_after(error: BaseException) -> NoReturn:
    """One line after Ctrl-C, which a simulation may have put into groups, a mistake, or a run that went wrong."""
    from dmoe_jax.routing.base import RouterError
    from net.errors import NetError

    errors = BaseExceptionGroup("", [error])
    if errors.subgroup(KeyboardInterrupt) is not None:
        print(f"{_PROG}: interrupted; --resume goes on", file=sys.stderr)
        sys.exit(_EXIT_INTERRUPTED)
    expected, others = errors.split((UsageError, FloatingPointError, RouterError, NetError))
    if expected is None or others is not None:
        raise error
    leaf: BaseException = expected
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    fail(str(leaf), prog=_PROG)


@contextmanager
def _mistakes_in_one_line() -> Iterator[None]:
    """What a wrong setting, a damaged file or a full folder raises while a run is set up is the user's to mend."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def run_models(command: TransformerXLCommand) -> dict[str, Any]:
    """Train the command's models on this machine; the headline of all.

    If it ends early, the run folder has the figure and report of what was reached.

    Raises:
      UsageError: for a corpus, folder, checkpoint or setting that will not do. KeyboardInterrupt, FloatingPointError,
        RouterError, NetError: as of `driver.train`.
    """
    from rich.console import Console

    from dmoe_jax.data.corpora import load_corpus
    from experiments.transformer_xl.resuming import open_parent

    console = Console(stderr=True)
    with _mistakes_in_one_line():
        _check_router(command)
        corpus = load_corpus(source=command.data)
        settings = {name: value for name, value in asdict(command).items() if name not in ("out", "resume", "json")}
        folder = open_parent(command.out, _PROG, settings, resume=command.resume, may_differ=_MAY_DIFFER)
    console.print(f"corpus: {corpus.description}", highlight=False)
    console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
    try:
        if command.num_jobs > 1:
            from experiments.transformer_xl.side_by_side import train_side_by_side

            train_side_by_side(command, folder.path, jobs=command.num_jobs, console=console)
        else:
            for model in command.models:
                train_model(command, model, corpus, folder.path / model)
    except BaseException:
        _compare(command, folder, corpus, {})
        raise
    overhead = _overhead(command, console)
    headline = _compare(command, folder, corpus, overhead)
    _print(command, headline, folder.path, console)
    return headline


def _check_router(command: TransformerXLCommand) -> None:
    """Try the router before anything is trained or written, if one of the models has any.

    Raises:
      ValueError: naming the router.
    """
    from dmoe_jax.routing.check import check_router
    from dmoe_jax.routing.registry import make_router
    from experiments.transformer_xl.presets import PRESETS

    for preset in (PRESETS[model, command.size] for model in command.models):
        if preset.grid_size:
            check_router(make_router(command.router, preset.grid_size), preset.grid_size, preset.d_model)


def train_model(command: TransformerXLCommand, model: Model, corpus: Any, path: Path) -> None:
    """Train one model in its own run folder, or go on with it, to its end. Raises as `run_models`."""
    from dmoe_jax.checkpoints import CheckpointError
    from dmoe_jax.cli.progress import TrainingProgress
    from dmoe_jax.routing.registry import make_router
    from experiments.transformer_xl.assembly import headline_facts, make_engine, make_plan, run_settings
    from experiments.transformer_xl.driver import train
    from experiments.transformer_xl.presets import PRESETS
    from experiments.transformer_xl.resuming import finished_headline, open_run
    from experiments.transformer_xl.stretches import Setting

    preset, place = PRESETS[model, command.size], command.place
    steps = command.steps or (preset.steps if place == "local" else preset.simulated_steps)
    if command.quick:
        steps = min(steps, _QUICK_STEPS[place])
    with _mistakes_in_one_line():
        router = make_router(command.router, preset.grid_size) if preset.grid_size else None
        setting = Setting(num_trainers=command.trainers, delay_s=command.delay_s, failure_rate=command.failure_rate)
        plan = make_plan(
            preset,
            steps=steps,
            # Few pauses: staleness begins anew after each.
            eval_every=command.eval_every or (max(1, steps // _QUICK_PAUSES) if command.quick else None),
            eval_tokens=min(command.eval_tokens or _QUICK_EVAL_TOKENS, _QUICK_EVAL_TOKENS)
            if command.quick
            else command.eval_tokens,
            final_eval_tokens=_QUICK_EVAL_TOKENS if command.quick else 0,
        )
        common: dict[str, Any] = {
            "where": place,
            "seed": command.seed,
            "batch_size": command.batch_size,
            "compute_dtype": "bfloat16" if command.bf16 else "float32",
            "setting": setting,
        }
        folder = open_run(
            path, run_settings(preset, corpus, plan, router=command.router, **common), resume=command.resume
        )
        if finished_headline(folder) is not None:
            return
        progress = TrainingProgress(steps)
        progress.say(f"{model}: {steps} updates, {place}")
        engine = make_engine(preset, corpus, steps=steps, router=router, **common)
        facts = headline_facts(preset, corpus, where=place, seed=command.seed, router=router)
    try:
        train(engine, folder, plan, corpus, progress, facts=facts)
    except CheckpointError as error:
        raise UsageError(str(error)) from error


def _overhead(command: TransformerXLCommand, console: Any) -> dict[str, Any]:
    """What the mixture costs on this device, where that was asked for."""
    if command.place != "local" or "dmoe" not in command.models or command.no_overhead:
        return {}
    from experiments.moe_overhead.measurement import measure_overhead

    console.print("what the mixture costs beside a dense layer of its FLOPs")
    measured = measure_overhead(
        size=command.size,
        router=command.router,
        batch_size=command.batch_size,
        compute_dtype="bfloat16" if command.bf16 else "float32",
        rounds=3 if command.quick else 7,
        steps_per_round=3 if command.quick else 10,
        seed=command.seed,
    )
    return {"moe_overhead": measured.ratio}


def _compare(
    command: TransformerXLCommand,
    folder: Any,
    corpus: Any,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Figure and report of the models that have begun; the headline of those that are done."""
    from dmoe_jax.runs.comparison import comparison_figure, write_comparison_report
    from dmoe_jax.runs.run_folder import FIGURE, RunFolder
    from experiments.transformer_xl.resuming import finished_headline

    folders = {model: RunFolder(folder.path / model) for model in command.models if (folder.path / model).is_dir()}
    headlines = {model: finished for model, run in folders.items() if (finished := finished_headline(run)) is not None}
    models = {
        model: {name: figures[name] for name in _HEADLINE if name in figures} for model, figures in headlines.items()
    }
    headline: dict[str, Any] = {"size": command.size, "where": command.place, "corpus": corpus.name}
    headline |= {"router": command.router} if "dmoe" in command.models else {}
    for other in ("small", "base"):
        if "dmoe" in models and other in models:
            ours, theirs = (models[model]["validation_perplexity"] for model in ("dmoe", other))
            headline[f"dmoe_below_{other}"] = ours < theirs
    headline |= more
    metrics = {model: run.metrics() for model, run in folders.items()}
    runs: dict[str, list[Any]] = {model: [records] for model, records in metrics.items() if records}
    if runs:
        title = f"Transformer-XL on {corpus.name}, {command.size}, {command.place}"
        comparison_figure(runs, folder.path / FIGURE, title=title)
        figures = {
            f"{model} {name}": values[name]
            for model, values in models.items()
            for name in ("validation_perplexity", "test_perplexity", "parameters")
        }
        write_comparison_report(
            folder, runs, {**headline, **figures}, title=title, summary=f"Corpus: {corpus.description}."
        )
    headline["models"] = models
    folder.log("headline", **headline)
    return headline


def _print(command: TransformerXLCommand, headline: Mapping[str, Any], path: Path, console: Any) -> None:
    from rich.table import Table

    from dmoe_jax.runs.report import format_value
    from dmoe_jax.runs.run_folder import plain

    models = headline["models"]
    table = Table(*("", *models), title="Transformer-XL", title_justify="left")
    for name in _HEADLINE:
        if any(name in figures for figures in models.values()):
            table.add_row(name.replace("_", " "), *(format_value(figures.get(name)) for figures in models.values()))
    console.print(table)
    for name in ("dmoe_below_small", "dmoe_below_base", "moe_overhead"):
        if name in headline:
            console.print(f"{name.replace('_', ' ')}: {format_value(headline[name])}", highlight=False)
    console.print(f"run folder: {path}", highlight=False, soft_wrap=True)
    if command.json:
        print(json.dumps(plain(headline)))
