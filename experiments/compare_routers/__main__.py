"""`python -m experiments.compare_routers`; see README.md beside this file."""

from experiments.compare_routers.run import main

main()
