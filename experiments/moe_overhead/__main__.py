"""`python -m experiments.moe_overhead`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.moe_overhead.settings import OverheadSettings

run_experiment(OverheadSettings)
