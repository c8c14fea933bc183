"""`python -m experiments.staleness`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.staleness.settings import StalenessSettings

NAME = "staleness"


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    run_experiment(StalenessSettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME, args=args)


if __name__ == "__main__":
    main()
