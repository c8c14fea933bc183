"""`python -m experiments.emulation`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.emulation.settings import EmulationSettings

NAME = "emulation"


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    run_experiment(EmulationSettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME, args=args)


if __name__ == "__main__":
    main()
