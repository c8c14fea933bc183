"""`python -m experiments.gpu`: the next measurement that waits for a GPU, or all of them."""

from functools import partial

from experiments.bench import run_experiment
from experiments.gpu.settings import GpuSettings

NAME = "gpu"
main = partial(run_experiment, GpuSettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME, uses_jax=False)

if __name__ == "__main__":
    main()
