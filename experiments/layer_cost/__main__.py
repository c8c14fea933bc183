"""`python -m experiments.layer_cost`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.layer_cost.settings import LayerCostSettings

run_experiment(LayerCostSettings)
