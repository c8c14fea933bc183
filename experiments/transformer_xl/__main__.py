"""`python -m experiments.transformer_xl`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.transformer_xl.settings import TransformerXLSettings

run_experiment(TransformerXLSettings)
