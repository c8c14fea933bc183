"""`python -m experiments.allreduce_speed`; see README.md beside this file."""

from experiments.allreduce_speed.run import main

main()
