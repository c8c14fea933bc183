"""`dmoe identity`: the name of a private key."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dmoe_jax.runs.speech import say
from dmoe_net.key_files import load_or_create_identity


@dataclass(frozen=True, kw_only=True)
class IdentityCommand:
    """Print the peer id of a private key, for allow-lists and --join. Makes the key if the file is missing."""

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """File of the private key, as for --identity."""

    def run(self) -> int:
        say(load_or_create_identity(self.file).peer_id)
        return 0
