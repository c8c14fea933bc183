"""`python -m experiments.paper`: the papers' figures and ours in one report."""

from experiments.bench import run_experiment
from experiments.paper.settings import PaperSettings

run_experiment(PaperSettings, uses_jax=False)
