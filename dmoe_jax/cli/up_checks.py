"""Mistakes that a process of `dmoe up` would refuse, told before any of them is started. Imports no JAX by itself."""

from collections.abc import Sequence
from pathlib import Path

from dmoe_jax.cli.init_flags import check_flags, settings_of_model
from dmoe_jax.cli.sources import Given
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.cli.train_options import LanguageModelOptions
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.endings import UsageError, mistakes_in_one_line
from dmoe_jax.training.prepared_run import is_code


def check_trainer(words: Sequence[str]) -> None:
    """Raise `UsageError` if `dmoe train` with these words would: for its flags, its folder, or the run that it goes on
    with. Of a Python file only the existence is checked: it is run in the trainer alone."""
    found: TrainCommand = parse_command_line(TrainCommand, prog="dmoe train", args=words)
    try:
        command = found.resumed(Given(typed=words))
        command.prepared()
    except UsageError as error:
        raise type(error)(f"{error}; nothing was started") from error
    check_file("--optimizer", command.trunk.optimizer)
    check_file("--model", command.model)
    language = command.language
    if command.model is not None or language.router == LanguageModelOptions.router:
        return
    if ":" in language.router or language.router.endswith(".py"):
        check_file("--router", language.router)
    else:
        from dmoe_jax.routing.registry import make_router  # which loads JAX

        with mistakes_in_one_line():
            make_router(language.router, language.grid_size)


def check_file(word: str, spec: str | None) -> None:
    """Raise `UsageError` if the value of a flag that takes FILE.py:NAME, unless it is None, names no file."""
    if spec is None:
        return
    if not is_code(spec) or spec.endswith(":"):
        raise UsageError(f"{word} must be FILE.py:NAME, got {spec!r}; nothing was started")
    path = Path(spec.rpartition(":")[0]).expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"{word} {spec}: there is no file {path}; nothing was started")


def check_init(init: Path, language: LanguageModelOptions) -> None:
    """Raise `UsageError` if the flags of the model are not those of an export to begin with, before nodes compile."""
    with mistakes_in_one_line():
        check_flags(init, settings_of_model(language))
