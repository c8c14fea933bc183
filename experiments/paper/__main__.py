"""`python -m experiments.paper`: the papers' figures and ours in one report."""

from functools import partial

from experiments.bench import run_experiment
from experiments.paper.settings import PaperSettings

main = partial(run_experiment, PaperSettings, "experiments.paper.measurement:EXPERIMENT", name="paper", uses_jax=False)

if __name__ == "__main__":
    main()
