"""Calls between peers: `base` says what a call is, `session` is one connection's protocol (a core), `peer`
the shell."""
