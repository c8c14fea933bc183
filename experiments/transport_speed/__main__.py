"""`python -m experiments.transport_speed`; see README.md beside this file."""

from experiments.transport_speed.run import main

main()
