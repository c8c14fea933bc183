"""The environment variables that the commands read."""

PREFIX = "DMOE_"
"""DMOE_K_BEST stands for `--k-best` where that is not given; see `dmoe_jax.cli.sources`."""

JOIN_VARIABLE = f"{PREFIX}JOIN"
"""Peers to join through, separated by blanks; stands for `--join` where that is not given."""

SECRET_VARIABLE = "DMOE_SWARM_SECRET_FILE"
"""File of the swarm's secret; stands for `--swarm-secret-file` where that is not given. Empty means none."""

NO_FLAGS = (SECRET_VARIABLE, "DMOE_DATA", "DMOE_LOGLEVEL", "DMOE_XLA_CACHE")
"""Variables that are no flag's: what they say counts for every process, also for those that a command starts."""

HELP = f"""\
Environment:
  {PREFIX}<FLAG>             stands for a flag where that is not given, such as {PREFIX}K_BEST and {JOIN_VARIABLE}
  {SECRET_VARIABLE}  stands for --swarm-secret-file where that is not given
  DMOE_DATA               folder of WikiText-2, for --data auto and wikitext-2
  DMOE_LOGLEVEL           INFO tells more, DEBUG also each failed call and why (default: WARNING)
  DMOE_XLA_CACHE          folder for compiled code; empty turns the cache off (default: a folder in ~/.cache/dmoe_jax)
"""
"""Text about them in `dmoe --help`."""
