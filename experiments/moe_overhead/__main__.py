"""`python -m experiments.moe_overhead`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.moe_overhead.settings import OverheadSettings

NAME = "moe_overhead"


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    run_experiment(OverheadSettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME, args=args)


if __name__ == "__main__":
    main()
