"""The `dmoe` command: run a DHT peer or an expert node, train over a swarm, look at one, name a key.

Each subcommand is a frozen dataclass whose fields are its flags; `tyro` reads them from the command line. Modules that
need JAX are imported by the command that uses them, so that `dmoe --help` answers at once.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from dmoe_jax.cli.common import UsageError, fail, parse_command_line
from dmoe_jax.cli.dht import DhtCommand
from dmoe_jax.cli.identity import IdentityCommand
from dmoe_jax.cli.node import NodeCommand
from dmoe_jax.cli.status import StatusCommand
from dmoe_jax.cli.train import TrainCommand

Command = (
    Annotated[DhtCommand, tyro.conf.subcommand("dht")]
    | Annotated[NodeCommand, tyro.conf.subcommand("node")]
    | Annotated[TrainCommand, tyro.conf.subcommand("train")]
    | Annotated[StatusCommand, tyro.conf.subcommand("status")]
    | Annotated[IdentityCommand, tyro.conf.subcommand("identity")]
)


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `dmoe`. Exits 0 when done, 1 on an error, 2 on a wrong flag, 130 after Ctrl-C."""
    description = "Decentralised mixture-of-experts training in JAX."
    command = parse_command_line(Command, prog="dmoe", description=description, args=args)
    try:
        if isinstance(command, TrainCommand):
            words = sys.argv[1:] if args is None else list(args)
            command = command.resumed(words[words.index("train") + 1 :])
        sys.exit(command.run())
    except UsageError as error:
        fail(str(error))
