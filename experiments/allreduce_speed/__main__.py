"""`python -m experiments.allreduce_speed`; see README.md beside this file."""

from experiments.allreduce_speed.settings import SpeedSettings
from experiments.bench import run_experiment

run_experiment(SpeedSettings, uses_jax=False)
