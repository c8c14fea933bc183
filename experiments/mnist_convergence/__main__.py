"""`python -m experiments.mnist_convergence`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.mnist_convergence.settings import MnistSettings

run_experiment(MnistSettings)
