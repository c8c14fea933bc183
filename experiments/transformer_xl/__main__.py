"""`python -m experiments.transformer_xl`; see README.md beside this file."""

from dmoe_jax.runs.command_line import parse_command_line
from experiments.bench import run_experiment
from experiments.transformer_xl.settings import NAME, TransformerXLSettings


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    settings = parse_command_line(TransformerXLSettings, prog=f"python -m experiments.{NAME}", args=args)
    module = "swarm" if settings.where == "swarm" else "measurement"
    run_experiment(TransformerXLSettings, f"experiments.transformer_xl.{module}:EXPERIMENT", name=NAME, args=args)


if __name__ == "__main__":
    main()
