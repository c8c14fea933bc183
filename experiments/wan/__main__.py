"""`python -m experiments.wan`; see README.md beside this file."""

from functools import partial

from experiments.bench import run_experiment
from experiments.wan.settings import WanSettings

main = partial(run_experiment, WanSettings, "experiments.wan.measurement:EXPERIMENT", name="wan")

if __name__ == "__main__":
    main()
