"""`python -m experiments.collaborative`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.collaborative.settings import NAME, CollaborativeSettings


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    run_experiment(CollaborativeSettings, "experiments.collaborative.measurement:EXPERIMENT", name=NAME, args=args)


if __name__ == "__main__":
    main()
