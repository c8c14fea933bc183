"""`python -m experiments.moshpit_averaging`; see README.md beside this file."""

from functools import partial

from experiments.bench import run_experiment
from experiments.moshpit_averaging.settings import AveragingSettings

NAME = "moshpit_averaging"
main = partial(run_experiment, AveragingSettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME)

if __name__ == "__main__":
    main()
