"""`python -m experiments.staleness`; see README.md beside this file."""

from functools import partial

from experiments.bench import run_experiment
from experiments.staleness.settings import StalenessSettings

NAME = "staleness"
main = partial(run_experiment, StalenessSettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME)

if __name__ == "__main__":
    main()
