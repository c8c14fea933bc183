"""`python -m experiments.dht_scale`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.dht_scale.settings import DhtScaleSettings

run_experiment(DhtScaleSettings, "experiments.dht_scale.measurement:EXPERIMENT", name="dht_scale", uses_jax=False)
