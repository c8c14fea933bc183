"""`python -m experiments.moshpit_sgd`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.moshpit_sgd.settings import MoshpitSgdSettings

NAME = "moshpit_sgd"


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    run_experiment(MoshpitSgdSettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME, args=args)


if __name__ == "__main__":
    main()
