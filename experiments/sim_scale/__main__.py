"""`python -m experiments.sim_scale`; see README.md beside this file."""

from experiments.bench import run_experiment
from experiments.sim_scale.settings import ScaleSettings

# JAX is left as it is: what is measured is a simulation beside the same calls without the settings of a command.
run_experiment(ScaleSettings, uses_jax=False)
