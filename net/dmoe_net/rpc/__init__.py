"""Calls between peers: `base` says what a call is, `session` is the core, `peer` the shell."""
