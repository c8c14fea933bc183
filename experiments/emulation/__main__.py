"""`python -m experiments.emulation`; see README.md beside this file."""

from functools import partial

from experiments.bench import run_experiment
from experiments.emulation.settings import EmulationSettings

NAME = "emulation"
main = partial(run_experiment, EmulationSettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME)

if __name__ == "__main__":
    main()
