"""`python -m experiments.mnist_convergence`; see README.md beside this file."""

from functools import partial

from experiments.bench import run_experiment
from experiments.mnist_convergence.settings import MnistSettings

NAME = "mnist_convergence"
main = partial(run_experiment, MnistSettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME)

if __name__ == "__main__":
    main()
