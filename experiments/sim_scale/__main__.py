"""`python -m experiments.sim_scale`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.sim_scale.settings import ScaleSettings

NAME = "sim_scale"


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    # JAX is left as it is: what is measured is a simulation beside the same calls without the settings of a command.
    run_experiment(ScaleSettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME, uses_jax=False, args=args)


if __name__ == "__main__":
    main()
