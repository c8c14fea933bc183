"""`python -m experiments.routing`; see README.md beside this file."""

from functools import partial

from experiments.bench import run_experiment
from experiments.routing.settings import RoutingSettings

NAME = "routing"
main = partial(run_experiment, RoutingSettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME)

if __name__ == "__main__":
    main()
