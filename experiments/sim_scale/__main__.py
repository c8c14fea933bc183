"""`python -m experiments.sim_scale`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.sim_scale.settings import ScaleSettings


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    run_experiment(ScaleSettings, "experiments.sim_scale.measurement:EXPERIMENT", name="sim_scale", args=args)


if __name__ == "__main__":
    main()
