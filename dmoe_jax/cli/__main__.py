"""`python -m dmoe_jax.cli`: the `dmoe` command where its script is not on the path."""

from dmoe_jax.cli import main

main()
