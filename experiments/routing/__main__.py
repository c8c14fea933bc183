"""`python -m experiments.routing`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.routing.settings import RoutingSettings

run_experiment(RoutingSettings)
