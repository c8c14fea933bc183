"""`python -m experiments.emulation`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.emulation.settings import EmulationSettings

run_experiment(EmulationSettings)
