"""The environment variables that the commands read."""

JOIN_VARIABLE = "DMOE_JOIN"
"""Peers to join through, separated by blanks; stands for `--join` where that is not given."""

SECRET_VARIABLE = "DMOE_SWARM_SECRET_FILE"
"""File of the swarm's secret; stands for `--swarm-secret-file` where that is not given. Empty means none."""

HELP = f"""\
Environment:
  {JOIN_VARIABLE}               peers to join through where --join is not given, separated by blanks
  {SECRET_VARIABLE}  stands for --swarm-secret-file where that is not given
  DMOE_DATA               folder of WikiText-2, for --data auto and wikitext-2
  DMOE_LOGLEVEL           INFO or DEBUG tell more, such as each failed call and why (default: WARNING)
  DMOE_XLA_CACHE          folder for compiled code; empty turns the cache off (default: a folder in ~/.cache/dmoe_jax)
"""
"""What `dmoe --help` says about them."""
