"""`python -m experiments.compare_routers`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.compare_routers.settings import NAME, CompareRoutersSettings


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    run_experiment(CompareRoutersSettings, "experiments.compare_routers.measurement:EXPERIMENT", name=NAME, args=args)


if __name__ == "__main__":
    main()
