"""`python -m experiments.compare_routers`; see README.md beside this file."""

from functools import partial

from experiments.bench import run_experiment
from experiments.compare_routers.settings import NAME, CompareRoutersSettings

main = partial(run_experiment, CompareRoutersSettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME)

if __name__ == "__main__":
    main()
