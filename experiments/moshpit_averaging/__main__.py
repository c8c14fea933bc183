"""`python -m experiments.moshpit_averaging`; see README.md beside this file."""

from experiments.moshpit_averaging.run import main

main()
