"""`python -m experiments.demo`; see README.md beside this file."""

from experiments.demo.run import main

main()
