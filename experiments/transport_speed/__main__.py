"""`python -m experiments.transport_speed`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.transport_speed.settings import SpeedSettings

run_experiment(SpeedSettings, uses_jax=False)
