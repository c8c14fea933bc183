"""`python -m experiments.moshpit_sgd`; see README.md beside this file."""

from experiments.moshpit_sgd.run import main

main()
