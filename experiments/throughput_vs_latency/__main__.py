"""`python -m experiments.throughput_vs_latency`; see README.md beside this file."""

from functools import partial

from experiments.bench import run_experiment
from experiments.throughput_vs_latency.settings import LatencySettings

NAME = "throughput_vs_latency"
main = partial(run_experiment, LatencySettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME)

if __name__ == "__main__":
    main()
