"""Parts that all experiments share: settings, a run folder, bars, figure, report, a JSON line and exit statuses.

An experiment has `settings.py`, a subclass of `Settings` that imports no JAX, so that `--help` and a wrong flag are
answered at once; `measurement.py`, an `Experiment`; and `__main__.py`, which calls `run_experiment`. `measure` writes
records into the run folder and `summarise` reads them again: a run that is interrupted, or fails half way, still leaves
a report of what it has.
"""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from rich.console import Console

from dmoe_jax.machine.cores import usable_cores
from dmoe_jax.machine.disk import check_not_held, hold_folder
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.endings import fail, mistakes_in_one_line
from dmoe_jax.runs.flags import as_words, flags_of, words_of
from dmoe_jax.runs.run_folder import FIGURE, RunFolder, plain, replaced_file, write_runs
from dmoe_jax.runs.setting_up import set_up_jax
from dmoe_jax.runs.speech import standard_streams
from dmoe_jax.training.prepared_run import check_code, prepare_run, saved_settings
from experiments.exits import ending_of, one_line_errors
from experiments.results import Result, result_table, write_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class UnseededSettings:
    """The flags of every experiment. A subclass may declare a field again in order to explain it better."""

    quick: bool = False
    """A shorter run that shows the same things."""
    out: Path | None = None
    """Run folder; must be new or empty. Default: runs/ and the time."""
    json: bool = False
    """Print the headline figures as one JSON object on the last line."""

    def __post_init__(self) -> None:
        """Raise ValueError for a wrong field; the command prints its line. Subclasses that check more call this too."""

    def require_at_least(self, least: float, *names: str) -> None:
        """Raise ValueError for the first of these fields that is below `least`; None was left to its default."""
        self._require(names, lambda value: value >= least, f"at least {least:g}")

    def require_above(self, bound: float, *names: str) -> None:
        """As `require_at_least`, but the bound itself is too little."""
        self._require(names, lambda value: value > bound, f"above {bound:g}")

    def _require(self, names: Sequence[str], is_right: Callable[[float], bool], text: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not is_right(value):
                raise ValueError(f"--{name.replace('_', '-')} must be {text}, got {value}")


@dataclass(frozen=True, kw_only=True)
class Settings(UnseededSettings):
    """The flags of every experiment that draws all its chance from one seed."""

    seed: int = 0
    """Seed of everything that is random."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "seed")


@dataclass(frozen=True, kw_only=True)
class ResumableSettings(UnseededSettings):
    """The flags of every experiment that can go on where it was interrupted."""

    may_differ: ClassVar[tuple[str, ...] | None] = None
    """Flags that a resumed run may change; None: all."""

    resume: bool = False
    """Go on with the run in --out: what is finished stays, what was interrupted goes on from its last checkpoint."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume and self.out is None:
            raise ValueError("--resume needs --out with the folder of the run to continue")


@dataclass(frozen=True, kw_only=True)
class SweepSettings(ResumableSettings):
    """The flags of every experiment that trains many times."""

    on: str = "here"
    """Place where trainings are computed: here, in processes that share this machine's cores; or on a cluster: slurm,
    dask, dask:ADDRESS, ray or ray:ADDRESS, each in a process of its own with NPROC threads, by default one."""
    jobs: int | None = None
    """Trainings at a time. Default: here two if there are two cores, but one where a model learns at once from whole
    batches; on a cluster 100."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "jobs")
        name, colon, address = self.on.partition(":")
        if name not in _PACKAGES or (colon and (not address or name in ("here", "slurm"))):
            raise ValueError(f"--on must be here, slurm, dask, dask:ADDRESS, ray or ray:ADDRESS, got {self.on}")
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ValueError(f"--on {name} needs the package {_PACKAGES[name]}: pip install 'dmoe_jax[{name}]'")
        if name == "slurm" and shutil.which("sbatch") is None:
            raise ValueError("--on slurm needs Slurm's sbatch, which is not on the PATH")

    @property
    def is_asynchronous(self) -> bool:
        """True if slow trainers of few samples each train the models, which keeps one core busy and hardly two."""
        return True

    @property
    def num_jobs(self) -> int:
        """Number of trainings at a time."""
        own = min(2, usable_cores()) if self.is_asynchronous else 1
        return self.jobs or (own if self.on == "here" else 100)


_PACKAGES = {"here": "experiments", "slurm": "submitit", "dask": "distributed", "ray": "ray"}
"""Engine of `experiments.engines` -> what it needs."""

FACTORS = tuple(2.0**power for power in range(-5, 3))
"""1/32 to 4 times the step sizes of a preset or a problem, which every search tries for each side."""

S = TypeVar("S", bound=UnseededSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Generic[S]):
    """Settings, run folder and console, as a measurement works with them."""

    settings: S
    """The command line."""
    folder: RunFolder
    """Folder of the records and results."""
    console: Console
    """Writes to standard output, or with --json to standard error."""

    def say(self, text: str) -> None:
        """Print a line for whoever waits."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def log(self, kind: str, /, **fields: object) -> None:
        """Append a record to the run's metrics.jsonl."""
        self.folder.log(kind, **fields)

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The run's records of one kind so far, in order; in a resumed run also those from before."""
        return [record for record in self.folder.metrics() if record["kind"] == kind]


def _open_folder(settings: UnseededSettings, name: str) -> RunFolder:
    """Make a new run folder, or open the one to go on with if the settings say `resume`. Raises ValueError, OSError."""
    if isinstance(settings, ResumableSettings) and settings.may_differ is not None:
        fields = {"experiment": name, **asdict(settings)}
        decisive = {key: value for key, value in fields.items() if key not in ("out", "resume", "json")}
        options: dict[str, Any] = {"resume": settings.resume, "may_differ": settings.may_differ}
        return prepare_run(settings.out, decisive, name=name, **options).begin()
    resume = isinstance(settings, ResumableSettings) and settings.resume
    if settings.out is not None:
        check_not_held(settings.out, "run")
    return RunFolder.create(settings.out, settings, name=name, resume=resume)


@dataclass(frozen=True, kw_only=True)
class Experiment(Generic[S]):
    """One experiment: how it measures, and what its records amount to."""

    measure: Callable[[Run[S]], None]
    """Measures and logs records. Ctrl-C and SIGTERM raise KeyboardInterrupt in it; it ends the processes that it
    started. A mistake of the user's is a `UsageError`."""
    summarise: Callable[[Run[S]], Result | None]
    """Computes the results from the run's records. It must cope with a run that ended early, and returns None where
    there is too little for a report."""
    draw: Callable[[Run[S], Result], "Figure | None"] | None = None
    """Returns the picture for figure.png, or None. Without this function the measurement draws its own, or none."""
    figure_text: str = ""
    """Description of the figure for readers who cannot see it."""
    check: Callable[[S], object] | None = None
    """Tries the settings before anything is written; a ValueError or OSError becomes one line."""
    write_report: Callable[[Run[S], Result], object] | None = None
    """Writes report.md; None: `results.write_result` does."""
    expected: tuple[type[Exception], ...] = ()
    """Errors of `measure` whose message is enough for a user, unless others were raised beside them."""
    causes: tuple[type[Exception], ...] = ()
    """Errors of `measure` that explain whatever was raised beside them, such as the death of a helper process."""


@standard_streams()
def run_experiment(
    settings_class: type[S],
    experiment: Experiment[S] | None = None,
    *,
    name: str = "",
    uses_jax: bool = True,
    args: list[str] | None = None,
) -> dict[str, Any]:
    """Run an experiment from the command line to its report.

    The process ends with status 2 after a mistake, 1 after a failure that the experiment expects, 75 where another
    process is at work in the folder, 130 after Ctrl-C or SIGTERM; each with one line. A missed bar is a result.

    Args:
      experiment: the experiment. None: EXPERIMENT of `experiments.NAME.measurement`, imported once the command line has
        been read.
      name: of the experiment; also begins its messages and the names of its run folders. Empty: its package's name.
      uses_jax: True to set JAX up (compilation cache, memory) before the experiment is imported.
      args: the command line; None for this process's.

    Returns:
      The headline, with the missed bars.

    Raises:
      SystemExit: in each of the cases above. Bugs are raised as they are.
    """
    name = name or settings_class.__module__.split(".")[1]
    prog = f"python -m experiments.{name}"
    words = sys.argv[1:] if args is None else args
    settings = parse_command_line(settings_class, prog=prog, args=words)
    with one_line_errors(name):
        settings = _resumed(settings, words, prog)
        if uses_jax:
            set_up_jax()
        if experiment is None:
            experiment = cast(Experiment[S], importlib.import_module(f"experiments.{name}.measurement").EXPERIMENT)
        with mistakes_in_one_line():
            if experiment.check is not None:
                experiment.check(settings)
            folder = _open_folder(settings, name)
    run = Run(settings=settings, folder=folder, console=Console(stderr=settings.json))
    errors: dict[str, Any] = {"expected": experiment.expected, "causes": experiment.causes}
    hint = "; --resume goes on" if isinstance(settings, ResumableSettings) else ""
    with one_line_errors(name, hint=hint, **errors), ExitStack() as held:
        with mistakes_in_one_line():
            held.enter_context(hold_folder(folder.path, "run"))
        try:
            experiment.measure(run)
        except BaseException as error:
            if (ending := ending_of(error, **errors)) is not None:
                run.log("event", name="ended_early", detail=ending.message)
                _report(run, experiment)
            raise
        result = _report(run, experiment)
    if result is None:
        raise RuntimeError(f"{name} has measured to its end, but has nothing to report")
    headline: dict[str, Any] = plain(result.headline)
    if settings.json:
        print(json.dumps(headline))
    if result.failure:
        fail(result.failure, prog=name)
    return headline


def _resumed(settings: S, given: Sequence[str], prog: str) -> S:
    """The settings with the flags that a run which is resumed was begun with, where those given now do not change them.

    Raises:
      UsageError: there is no run in the folder, or a Python file is named by the folder alone.
    """
    if not isinstance(settings, ResumableSettings) or not settings.resume or settings.out is None:
        return settings
    with mistakes_in_one_line():
        saved = saved_settings(settings.out)
    words = []
    for flag in flags_of(type(settings)):
        value = saved.get(flag.key)
        if flag.key not in ("out", "resume", "json") and value not in (None, plain(flag.default)):
            words += as_words(flag.word, value)
    resumed: S = parse_command_line(type(settings), prog=prog, args=[*words, *given])
    with mistakes_in_one_line():
        check_code(settings.out, words_of(resumed), named=given, otherwise="")
    return resumed


def _report(run: Run[S], experiment: Experiment[S]) -> Result | None:
    """Draw, write and print what the records amount to; None where there is too little."""
    result = experiment.summarise(run)
    if result is None:
        return None
    run.log("bars", bars=[{"name": bar.name, "bar": str(bar), "verdict": result.verdict(bar)} for bar in result.bars])
    run.log("headline", **plain(result.headline))
    picture = None if experiment.draw is None else experiment.draw(run, result)
    if picture is not None:
        with replaced_file(run.folder.path / FIGURE) as temporary:
            picture.savefig(temporary, dpi=130)
    if experiment.write_report is None:
        write_result(run.folder, result, figure_text=experiment.figure_text)
    else:
        experiment.write_report(run, result)
    if result.runs:
        write_runs(run.folder, result.runs)
    for renderable in [result_table(result)] if result.printed is None else result.printed:
        run.console.print(renderable)
    run.say(f"run folder: {run.folder.path}")
    return result
