"""`python -m experiments.moshpit_sgd`; see README.md beside this file."""

from functools import partial

from experiments.bench import run_experiment
from experiments.moshpit_sgd.settings import MoshpitSgdSettings

main = partial(run_experiment, MoshpitSgdSettings, "experiments.moshpit_sgd.measurement:EXPERIMENT", name="moshpit_sgd")

if __name__ == "__main__":
    main()
