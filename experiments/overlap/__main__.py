"""`python -m experiments.overlap`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.overlap.settings import OverlapSettings

run_experiment(OverlapSettings, "experiments.overlap.measurement:EXPERIMENT", name="overlap")
