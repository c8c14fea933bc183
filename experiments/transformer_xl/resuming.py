"""A run folder that is taken up again: under the same settings, and without what its lost stretch has written."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dmoe_jax.runs.run_folder import METRICS, RunFolder, plain

_KEPT = tuple(f'{{"kind":"event","name":"{name}"'.encode() for name in ("interrupted", "failed", "resumed"))
"""How lines begin that tell of what happened once; a stretch that is trained again tells the rest again."""


def open_run(
    path: Path, settings: Mapping[str, object], *, resume: bool, may_differ: Collection[str] = ()
) -> RunFolder:
    """The folder of a run; with `resume` one that exists may go on, under the same settings.

    Args:
      path: the folder.
      settings: all that decides what the run computes, and nothing else.
      resume: whether it may exist.
      may_differ: settings that may be others than before.

    Raises:
      ValueError: naming the first setting that was another one; or the folder is not empty although `resume` is false,
        or is not a run folder. OSError: it cannot be written.
    """
    if resume and path.is_dir() and any(path.iterdir()):
        try:
            before = RunFolder(path).config()["settings"]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path} is not a run that could be resumed: it has no readable config.json") from error
        now = plain(settings)
        for name in sorted({*before, *now} - {*may_differ}):
            if before.get(name) != now.get(name):
                raise ValueError(
                    f"the run in {path} was begun with {name} {before.get(name)!r} and cannot be resumed with "
                    f"{now.get(name)!r}"
                )
    return RunFolder.create(path, settings, resume=resume)


def open_parent(
    path: Path | None, name: str, settings: Mapping[str, object], *, resume: bool, may_differ: Collection[str]
) -> RunFolder:
    """The folder of an experiment of several runs; see `open_run`.

    Args:
      path: None for a new folder under runs/.
      name: of the experiment; the folder of another one is refused.
      settings: as it was called.
      resume: whether it may exist.
      may_differ: settings that may be others than before.

    Raises:
      ValueError, OSError: as of `open_run`.
    """
    settings = {"experiment": name, **settings}
    if path is None:
        return RunFolder.create(None, settings, name=name)
    return open_run(path, settings, resume=resume, may_differ=may_differ)


def finished_headline(folder: RunFolder) -> dict[str, Any] | None:
    """The headline of a run that has been completed; None for one that is still to be trained or resumed."""
    headlines = [record for record in folder.metrics() if record["kind"] == "headline"]
    if not headlines or not headlines[-1].get("complete"):
        return None
    return {name: value for name, value in headlines[-1].items() if name != "kind"}


def cut_metrics(folder: RunFolder, size: int) -> None:
    """Take what was written after a checkpoint out of the metrics, but for the run's own ends and beginnings.

    Args:
      folder: of the run.
      size: bytes that metrics.jsonl had at the checkpoint; 0 if there is none.
    """
    if not folder.metrics_path.exists() or folder.metrics_path.stat().st_size == size:
        return
    data = folder.metrics_path.read_bytes()
    events = [line for line in data[size:].splitlines(keepends=True) if line.startswith(_KEPT)]
    folder.write_text(METRICS, (data[:size] + b"".join(events)).decode())
