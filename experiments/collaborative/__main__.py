"""`python -m experiments.collaborative`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.collaborative.settings import CollaborativeSettings

if __name__ == "__main__":
    run_experiment(CollaborativeSettings, "experiments.collaborative.measurement:EXPERIMENT", name="collaborative")
