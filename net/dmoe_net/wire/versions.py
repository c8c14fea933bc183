"""The version of what calls and records say, beside that of the bytes (`dmoe_net.wire.frames.VERSION`).

Peers of different versions do not talk to each other: both say so, and name both.
"""

from importlib import metadata

CALLS = 4
"""Version of what calls and DHT records say: methods with their bodies and tensors, keys, subkeys and values. Raised
with each change that a peer of the version before would refuse or read wrongly."""

MAX_VERSION = 2**31
"""Largest version that a peer may claim."""


def _software() -> str:
    try:
        return f"dmoe_jax {metadata.version('dmoe_jax')}"
    except metadata.PackageNotFoundError:  # run from its source alone
        return "dmoe_jax"


SOFTWARE = _software()
"""Name and version of this program, for people."""


def versions_differ(what: str, theirs: object, ours: int, *, software: str = "") -> str:
    """The rest of a sentence that begins with a peer: "speaks version 2 of WHAT, this peer version 3 ...".

    Args:
      what: the thing whose version it is, such as "calls and records".
      theirs: the other end's version; None if it says none.
      ours: this end's.
      software: name and version of the other end's program; "": it says none.
    """
    by = f" ({ascii(software)[1:-1]})" if software else ""
    version = "no version" if theirs is None else f"version {theirs!r:.20}"
    return (
        f"speaks {version} of {what}{by}, this peer version {ours} ({SOFTWARE}): they cannot work together until both "
        "run the same version of dmoe_jax"
    )
