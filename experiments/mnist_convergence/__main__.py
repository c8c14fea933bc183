"""`python -m experiments.mnist_convergence`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.mnist_convergence.settings import MnistSettings

NAME = "mnist_convergence"


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    run_experiment(MnistSettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME, args=args)


if __name__ == "__main__":
    main()
