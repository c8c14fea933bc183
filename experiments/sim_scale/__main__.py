"""`python -m experiments.sim_scale`; see README.md beside this file."""

from experiments.sim_scale.run import main

main()
