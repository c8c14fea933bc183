"""`python -m experiments.less_traffic`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.less_traffic.settings import LessTrafficSettings

run_experiment(LessTrafficSettings)
