"""`python -m experiments.dht_scale`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.dht_scale.settings import DhtScaleSettings

run_experiment(DhtScaleSettings, uses_jax=False)
