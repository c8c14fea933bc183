"""`python -m experiments.moshpit_averaging`; see README.md beside this file."""

from functools import partial

from experiments.bench import run_experiment
from experiments.moshpit_averaging.settings import AveragingSettings

main = partial(
    run_experiment,
    AveragingSettings,
    "experiments.moshpit_averaging.measurement:EXPERIMENT",
    name="moshpit_averaging",
)

if __name__ == "__main__":
    main()
