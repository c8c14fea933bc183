"""`python -m experiments.wan`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.wan.settings import WanSettings

run_experiment(WanSettings)
