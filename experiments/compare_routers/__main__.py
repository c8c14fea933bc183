"""`python -m experiments.compare_routers`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.compare_routers.settings import CompareRoutersSettings

run_experiment(CompareRoutersSettings)
