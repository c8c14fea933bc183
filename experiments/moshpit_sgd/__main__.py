"""`python -m experiments.moshpit_sgd`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.moshpit_sgd.settings import MoshpitSgdSettings

run_experiment(MoshpitSgdSettings)
