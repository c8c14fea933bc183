"""`python -m experiments.moshpit_averaging`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.moshpit_averaging.settings import AveragingSettings

run_experiment(AveragingSettings)
