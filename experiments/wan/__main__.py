"""`python -m experiments.wan`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.wan.settings import WanSettings

if __name__ == "__main__":
    run_experiment(WanSettings, "experiments.wan.measurement:EXPERIMENT", name="wan")
