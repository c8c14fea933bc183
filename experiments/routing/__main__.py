"""`python -m experiments.routing`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.routing.settings import NAME, RoutingSettings


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    run_experiment(RoutingSettings, "experiments.routing.measurement:EXPERIMENT", name=NAME, args=args)


if __name__ == "__main__":
    main()
