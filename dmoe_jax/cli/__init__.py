"""The `dmoe` command.

Each subcommand is a frozen dataclass whose fields are its flags; `tyro` reads them from the command line, and `run`
returns the exit status. Modules that need JAX are imported by the command that uses them, so that `dmoe --help` answers
at once.
"""

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from dmoe_jax.cli.assist import AssistCommand
from dmoe_jax.cli.demo import DemoCommand
from dmoe_jax.cli.dht import DhtCommand
from dmoe_jax.cli.evaluate import EvaluateCommand
from dmoe_jax.cli.export import ExportCommand
from dmoe_jax.cli.generate import GenerateCommand
from dmoe_jax.cli.identity import IdentityCommand
from dmoe_jax.cli.inspect import InspectCommand
from dmoe_jax.cli.network import check_join
from dmoe_jax.cli.node import NodeCommand
from dmoe_jax.cli.runs import CleanRunsCommand, CompareRunsCommand, RunsCommand
from dmoe_jax.cli.serve import ServeCommand
from dmoe_jax.cli.sources import Given, gather
from dmoe_jax.cli.status import StatusCommand
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.cli.up import UpCommand
from dmoe_jax.cli.watch import WatchCommand
from dmoe_jax.machine.environment import HELP, JOIN_VARIABLE
from dmoe_jax.runs.command_line import commands_of, parse_command_line
from dmoe_jax.runs.endings import EXIT_HELP, EXIT_INTERRUPTED, UsageError, fail, mistakes_in_one_line
from dmoe_jax.runs.speech import say, standard_streams
from dmoe_net.keys import IdentityError

Command = (
    Annotated[DemoCommand, tyro.conf.subcommand("demo")]
    | Annotated[UpCommand, tyro.conf.subcommand("up")]
    | Annotated[DhtCommand, tyro.conf.subcommand("dht")]
    | Annotated[NodeCommand, tyro.conf.subcommand("node")]
    | Annotated[TrainCommand, tyro.conf.subcommand("train")]
    | Annotated[AssistCommand, tyro.conf.subcommand("assist")]
    | Annotated[StatusCommand, tyro.conf.subcommand("status")]
    | Annotated[WatchCommand, tyro.conf.subcommand("watch")]
    | Annotated[InspectCommand, tyro.conf.subcommand("inspect")]
    | Annotated[EvaluateCommand, tyro.conf.subcommand("evaluate")]
    | Annotated[GenerateCommand, tyro.conf.subcommand("generate")]
    | Annotated[ServeCommand, tyro.conf.subcommand("serve")]
    | Annotated[ExportCommand, tyro.conf.subcommand("export")]
    | Annotated[RunsCommand, tyro.conf.subcommand("runs")]
    | Annotated[CompareRunsCommand, tyro.conf.subcommand("runs compare")]
    | Annotated[CleanRunsCommand, tyro.conf.subcommand("runs clean")]
    | Annotated[IdentityCommand, tyro.conf.subcommand("identity")]
)


@standard_streams()
def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `dmoe`. Exits as `EXIT_HELP` says."""
    words = list(sys.argv[1:] if args is None else args)
    if (name := " ".join(words[:2])) in commands_of(Command):
        words[:2] = [name]  # such as "runs clean"
    if words == ["--version"]:
        try:
            version = importlib.metadata.version("dmoe-jax")
        except importlib.metadata.PackageNotFoundError:  # a folder that was never installed
            version = "of an unknown version"
        say(f"dmoe_jax {version}")
        return
    if words[:1] == ["completion"]:
        words = ["--tyro-print-completion", *words[1:]]
    description = (
        "Decentralised mixture-of-experts training in JAX. dmoe --version tells the version; dmoe completion bash (or "
        f"zsh, tcsh) prints what completes its flags.\n\n{HELP}\n{EXIT_HELP}"
    )
    try:
        given = _given(words)
        command: Command = parse_command_line(
            Command, prog="dmoe", description=description, args=[*words[:1], *given.words], origins=given.origins
        )
        # Before any import that takes seconds: a slip of the pen is told at once.
        check_join(getattr(command, "join", ()))
        if hasattr(command, "network"):
            command.network.security()
        if isinstance(command, TrainCommand | UpCommand):
            command = command.resumed(given)
        folder = getattr(command, "folder", command)
        with mistakes_in_one_line():
            given.check_code(is_trusted=getattr(folder, "trust_run", False), can_trust=hasattr(folder, "trust_run"))
        sys.exit(command.run())
    except UsageError as error:
        fail(str(error), status=error.status)
    except IdentityError as error:
        fail(str(error))
    except KeyboardInterrupt:  # of a command without an event loop
        sys.exit(EXIT_INTERRUPTED)


def _given(words: Sequence[str]) -> Given:
    """Flags of all sources for the command that the words call, if they call one and do not ask for help."""
    name, *typed = [*words] or [""]
    command = commands_of(Command).get(name)
    if command is None or {"--help", "-h"} & {*typed}:
        return Given(typed=typed)
    # What reads a run asks a swarm only if it is told to, and `dmoe watch` not beside a folder.
    is_run = name == "watch" and bool(typed) and not typed[0].startswith("-")
    is_told = not is_run and name not in ("inspect", "evaluate", "generate", "serve")
    environ = {key: value for key, value in os.environ.items() if key != JOIN_VARIABLE or is_told}
    return gather(command, typed, environ, name=name)
