"""`python -m experiments.transformer_xl`; see README.md beside this file."""

from experiments.transformer_xl.run import main

main()
