"""`python -m experiments.moe_overhead`; see README.md beside this file."""

from experiments.moe_overhead.run import main

main()
