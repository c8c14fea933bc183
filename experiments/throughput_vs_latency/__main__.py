"""`python -m experiments.throughput_vs_latency`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.throughput_vs_latency.settings import LatencySettings

run_experiment(LatencySettings)
