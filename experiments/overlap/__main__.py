"""`python -m experiments.overlap`; see README.md beside this file."""

from experiments.overlap.run import main

main()
