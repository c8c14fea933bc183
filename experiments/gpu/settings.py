"""What the command line of this experiment can ask for."""

from dataclasses import dataclass
from pathlib import Path

from experiments.bench import UnseededSettings
from experiments.gpu.steps import STEPS

LEAST_MINUTES = 2.0
"""Half a minute of a command is for its end, and another for Python's start."""


@dataclass(frozen=True, kw_only=True)
class GpuSettings(UnseededSettings):
    """Run the next of the measurements that wait for a GPU; what is finished is skipped, what was begun goes on."""

    list: bool = False
    """Print all steps with what each is for and about how long it takes, and run nothing."""
    all: bool = False
    """Run one step after the other until all are finished. Default: one command of the next one."""
    minutes: float = 10.0
    """Limit of each command. A step that needs more takes several, each of which goes on where the one before ended."""
    only: tuple[str, ...] = ()
    """Names of steps, in the order of the list. Default: all."""
    anyway: bool = False
    """Run on a machine without a GPU."""
    quick: bool = False
    """The quick run of each step, in a folder of its own: does all of it work on this machine?"""
    out: Path | None = None
    """Run folder, in which every call goes on. Default: runs/gpu, with --quick runs/gpu-quick."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(LEAST_MINUTES, "minutes")
        for name in self.only:
            if name not in (names := [step.name for step in STEPS]):
                raise ValueError(f"--only has names out of {', '.join(names)}, got {name}")

    @property
    def folder(self) -> Path:
        """Where the steps' folders are."""
        return self.out or Path("runs") / ("gpu-quick" if self.quick else "gpu")
