"""`python -m experiments.node_speed`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.node_speed.settings import SpeedSettings

run_experiment(SpeedSettings, uses_jax=False)
