"""`python -m experiments.collaborative`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.collaborative.settings import CollaborativeSettings

run_experiment(CollaborativeSettings)
