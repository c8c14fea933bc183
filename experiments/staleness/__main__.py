"""`python -m experiments.staleness`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.staleness.settings import StalenessSettings

run_experiment(StalenessSettings)
