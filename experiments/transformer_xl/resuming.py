"""A run folder that is taken up again: under the same settings, and without what its lost stretch has written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmoe_jax.runs.run_folder import METRICS, RunFolder, plain


def open_run(path: Path, settings: Mapping[str, object], *, resume: bool) -> RunFolder:
    """The folder of a run; with `resume` one that exists may go on, under the same settings.

    Args:
      path: the folder.
      settings: all that decides what the run computes, and nothing else.
      resume: whether it may exist.

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
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                raise ValueError(
                    f"the run in {path} was begun with {name} {before.get(name)!r} and cannot be resumed with "
                    f"{now.get(name)!r}"
                )
    return RunFolder.create(path, settings, resume=resume)


def finished_headline(folder: RunFolder) -> dict[str, Any] | None:
    """The headline of a run that has been completed; None for one that is still to be trained or resumed."""
    headlines = [record for record in folder.metrics() if record["kind"] == "headline"]
    if not headlines or not headlines[-1].get("complete"):
        return None
    return {name: value for name, value in headlines[-1].items() if name != "kind"}


def cut_metrics(folder: RunFolder, size: int) -> None:
    """Take what was written after a checkpoint out of the metrics, but for the events: they did happen.

    Args:
      folder: of the run.
      size: bytes that metrics.jsonl had at the checkpoint; 0 if there is none.
    """
    if not folder.metrics_path.exists() or folder.metrics_path.stat().st_size == size:
        return
    data = folder.metrics_path.read_bytes()
    events = [line for line in data[size:].splitlines(keepends=True) if line.startswith(b'{"kind":"event"')]
    folder.write_text(METRICS, (data[:size] + b"".join(events)).decode())
