"""`python -m experiments.moshpit_averaging`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.moshpit_averaging.settings import AveragingSettings

NAME = "moshpit_averaging"


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    run_experiment(AveragingSettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME, args=args)


if __name__ == "__main__":
    main()
