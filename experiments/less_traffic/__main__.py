"""`python -m experiments.less_traffic`; see README.md beside this file."""

from functools import partial

from experiments.bench import run_experiment
from experiments.less_traffic.settings import LessTrafficSettings

main = partial(
    run_experiment, LessTrafficSettings, "experiments.less_traffic.measurement:EXPERIMENT", name="less_traffic"
)

if __name__ == "__main__":
    main()
