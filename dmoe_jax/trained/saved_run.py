"""The contents of a run folder by its records: its model, its text, and its end. Imports no JAX, to refuse at once."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmoe_jax.runs.run_folder import CONFIG, RunFolder
from dmoe_jax.training.prepared_run import CHECKPOINT_FOLDER, finished_headline

SHARED_FOLDER = "shared"
"""Name of the folder, in that of `saved_experts`, of nodes that take over each other's experts."""

LOGS, NODES = ".logs", ".nodes"
"""Ends of the names of the folders that `dmoe up` has beside its run: of its logs, and of its nodes' experts."""

UP_FLAGS = "up.json"
"""File in the folder of the logs with the flags of `dmoe up`, a list of words in JSON."""

_DEPTH, _MAX_NAMED = 3, 4
"""Depth of runs below the folder of an experiment at most, and runs that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A run of a Transformer-XL with a mixture of experts, with a checkpoint. Made by `find_run`."""

    path: Path
    sizes: Mapping[str, Any]
    """Fields of `TransformerXLConfig`, those of the layer nested; without the vocabulary's size where words decide."""
    router: str
    """Name of its router, or FILE.py:NAME."""
    corpus: str
    """Name of the text that it was trained on."""
    data: str
    """Source of that text, as for `load_corpus`."""
    is_complete: bool

    @property
    def checkpoints(self) -> Path:
        """Folder of its checkpoints."""
        return self.path / CHECKPOINT_FOLDER

    @property
    def inspection(self) -> Path:
        """Folder of its pictures."""
        return self.path / "inspection"


def find_run(path: Path, *, data: str | None = None, unfinished: bool = False) -> SavedRun:
    """The run in a folder of `dmoe train`, `dmoe demo`, `dmoe up` or `experiments.transformer_xl`.

    Args:
      data: source of the text; None: as the run had it.
      unfinished: true if a run that was not trained to its end will do.

    Raises:
      ValueError: there is none, or it cannot be inspected. OSError: its files cannot be read.
    """
    if not path.is_dir():
        raise ValueError(f"there is no run folder {path}")
    try:
        settings = RunFolder(path).config()["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no run folder: it has no readable {CONFIG}{_runs_below(path)}") from error
    if "experiment" in settings:
        raise ValueError(f"{path} is the folder of an experiment, not of one run{_runs_below(path)}")
    records = RunFolder(path).metrics()
    corpus = next((str(record.get("name")) for record in records if record["kind"] == "task"), "")
    if isinstance(settings.get("language"), dict):
        read = _of_train
    elif isinstance(settings.get("config"), dict):
        read = _of_experiment
    else:
        raise ValueError(
            f"{path} is no run of a language model; expected a folder of dmoe train, dmoe demo, dmoe up or "
            "experiments.transformer_xl"
        )
    try:
        sizes, router, source = read(path, settings)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} was made by another version, or its {CONFIG} is damaged: {error!r:.200}") from error
    found = SavedRun(
        path=path,
        sizes=sizes,
        router=router,
        corpus=corpus or source,
        data=data or source,
        is_complete=finished_headline(RunFolder(path)) is not None,
    )
    if not found.checkpoints.is_dir() or not any(found.checkpoints.iterdir()):
        raise ValueError(f"there is no checkpoint in {found.checkpoints}: the run has not come so far")
    if not found.is_complete and not unfinished:
        steps = max((record.get("step") or 0 for record in records if record["kind"] == "train"), default=0)
        raise ValueError(f"the run in {path} is unfinished, at step {steps}; --unfinished inspects its last checkpoint")
    return found


def saved_experts(run: Path) -> Path:
    """Folder in which `dmoe up` and `dmoe demo` have each node save its experts in a folder of its own."""
    return run.with_name(run.name + NODES)


def up_logs(run: Path) -> Path:
    """Folder in which `dmoe up` and `dmoe demo` keep the logs of their processes."""
    return run.with_name(run.name + LOGS)


def trainer_folder(run: Path, number: int) -> Path:
    """Run folder of a trainer process of `dmoe up`, by its number: that of the first one is the run's."""
    return run.with_name(f"{run.name}.trainer{number}") if number else run


def trainer_folders(run: Path) -> dict[int, Path]:
    """The run folders of the trainer processes of a run that are there, by number."""
    named = run if run.name not in ("", "..") else run.resolve()
    name = re.compile(rf"{re.escape(named.name)}(?:\.trainer([1-9]\d*))?")
    found = ((name.fullmatch(each.name), each) for each in named.parent.iterdir())
    return {int(match[1] or 0): each for match, each in found if match is not None}


def first_trainer(path: Path) -> Path:
    """The run folder of the first trainer process of the `dmoe up` that made this one: itself, or it lies beside."""
    return path.with_name(re.sub(r"\.trainer\d+$", "", path.name))


def _of_train(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, Any], str, str]:
    if settings.get("model") is not None:
        raise ValueError(
            f"{path} is a run of a model of your own, {settings['model']}; only the Transformer-XL can be read back"
        )
    sizes = {**settings["language"], "k_best": settings["calls"]["k_best"]}
    router, cutoffs = str(sizes.pop("router")), sizes["cutoffs"]
    return {**sizes, "cutoffs": () if cutoffs == "none" else tuple(cutoffs)}, router, str(settings["data"]["data"])


def _of_experiment(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, Any], str, str]:
    sizes = dict(settings["config"])
    if not sizes.get("grid_size"):
        raise ValueError(
            f"{path} is a run of a dense model, {settings.get('model')!r}: it has no experts to choose from"
        )
    return sizes, str(settings["router"]), str(settings["corpus"])


def _runs_below(path: Path) -> str:
    patterns = ["/".join(["*"] * depth) for depth in range(1, _DEPTH + 1)]
    found = [below.parent for each in patterns for below in sorted(path.glob(f"{each}/{CHECKPOINT_FOLDER}"))]
    if not found:
        return ""
    names = ", ".join(map(str, found[:_MAX_NAMED]))
    return f"; it holds {len(found)} runs: {names}{', ...' if len(found) > _MAX_NAMED else ''}"
