"""`python -m experiments.transformer_xl`; see README.md beside this file."""

from functools import partial

from experiments.bench import run_experiment
from experiments.transformer_xl.settings import NAME, TransformerXLSettings

main = partial(run_experiment, TransformerXLSettings, f"experiments.{NAME}.measurement:EXPERIMENT", name=NAME)

if __name__ == "__main__":
    main()
