"""`dmoe inspect`: pictures of what a run's router learnt."""

import json
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import trio
import tyro
from rich.console import Console

from dmoe_jax.cli.checks import check_at_least
from dmoe_jax.cli.lifecycle import Stop, run_until_done
from dmoe_jax.cli.network import JoinTexts, MemberOptions, join_swarm
from dmoe_jax.cli.sources import ConfigFile
from dmoe_jax.runs.endings import UsageError, mistakes_in_one_line, one_line
from dmoe_jax.runs.setting_up import set_up_jax
from dmoe_jax.runs.speech import say
from dmoe_jax.trained.saved_run import SavedRun, find_run
from dmoe_jax.training.prepared_run import check_code, is_code

if TYPE_CHECKING:
    from dmoe_jax.data.corpora import Corpus
    from dmoe_jax.inspection.reading import Reading
    from dmoe_jax.trained.saved_model import SavedModel


@dataclass(frozen=True, kw_only=True)
class InspectCommand:
    """Draw what the router of a finished run learnt, into RUN/inspection with a report.md.

    Which experts are chosen for which words and places, and how the load moved while it was learnt.
    """

    run_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(name="run", metavar="RUN")]
    """Folder of a run of dmoe train, dmoe demo, dmoe up or experiments.transformer_xl."""
    experts: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FOLDER [FOLDER ...]")] = ()
    """Folders in which the nodes of a swarm saved its experts, each one's --checkpoint-dir. Without its experts a run
    shows the first layer's choices only. Default: those of dmoe up, of dmoe demo --save-experts, or of
    experiments.transformer_xl."""
    join: JoinTexts = ()
    """Peers of a swarm that is alive, whose experts are asked instead. They do not learn from it."""
    network: Annotated[MemberOptions, tyro.conf.arg(name="")] = field(default_factory=MemberOptions)
    """Identity of this process in that swarm."""
    data: str | None = None
    """The text that the run was trained on, as for dmoe train. Default: as the run had it."""
    split: Literal["valid", "test", "train"] = "valid"
    """Part of the text that the model reads."""
    tokens: int = 65_536
    """Words that it reads, from evenly spaced places; 0 for all."""
    router: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:NAME")] = None
    """The run's router again, if it is out of a file of your own: no file is run only because a run names it."""
    trust_run: bool = False
    """Run the Python file that the run names for its router."""
    unfinished: bool = False
    """Inspect the last checkpoint of a run that was not trained to its end."""
    config: ConfigFile = None
    json: bool = False
    """Print the figures as one JSON object."""

    def run(self) -> int:
        return run_until_done(self._inspect)

    async def _inspect(self, stop: Stop) -> int:
        del stop  # cancelled as a whole: pictures are written at once or not at all
        check_at_least(0, self, "tokens")
        if find_spec("matplotlib") is None:
            raise UsageError("dmoe inspect draws with Matplotlib, which is missing: pip install matplotlib")
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        with mistakes_in_one_line():
            run = find_run(self.run_folder, data=self.data, unfinished=self.unfinished)
            if self.router is not None and not is_code(run.router):
                raise ValueError(f"--router would have no effect: that of the run is {run.router}")
            run = replace(run, router=self.router or run.router)
            if not self.trust_run:
                check_code(run.path, [run.router], named=[self.router or ""])
        set_up_jax()
        # In a thread, so that Ctrl-C is heard.
        in_thread = partial(trio.to_thread.run_sync, abandon_on_cancel=True)
        with mistakes_in_one_line():
            model, corpus = await in_thread(self._load, run)
        experts = f"{int(model.known.sum())} of {model.known.size} experts saved"
        console.print(f"{run.path}: step {model.step}, {experts}; reading {corpus.name}")
        reading = await (self._ask(model, corpus) if self.join else in_thread(self._read, model, corpus))
        figures = await in_thread(self._write, run, model, reading, corpus)
        console.print(f"{run.inspection / 'report.md'}: {', '.join(figures['pictures'])}")
        for text in figures["left_out"]:
            console.print(f"left out: {text}")
        if self.json:
            say(json.dumps(figures))
        return 0

    def _load(self, run: SavedRun) -> "tuple[SavedModel, Corpus]":
        from dmoe_jax.trained.saved_model import load_model, open_corpus

        corpus = open_corpus(run)
        return load_model(run, len(corpus.vocabulary), self.experts), corpus

    def _read(self, model: "SavedModel", corpus: "Corpus") -> "Reading":
        from dmoe_jax.inspection.reading import cut, read_locally

        with mistakes_in_one_line():
            return read_locally(model, cut(getattr(corpus, self.split), model.config.seq_len, self.tokens))

    async def _ask(self, model: "SavedModel", corpus: "Corpus") -> "Reading":
        from dmoe_jax.inspection.reading import cut, read_in_swarm
        from dmoe_jax.swarm.opening import swarm_of

        batches = cut(getattr(corpus, self.split), model.config.seq_len, self.tokens)
        async with (
            join_swarm(self.network, join=self.join) as peer,
            swarm_of(peer, name=self.network.swarm) as swarm,
        ):
            with mistakes_in_one_line():
                return await read_in_swarm(model, swarm, batches)

    def _write(self, run: SavedRun, model: "SavedModel", reading: "Reading", corpus: "Corpus") -> dict[str, Any]:
        from dmoe_jax.inspection.report import write_inspection  # Matplotlib takes its time

        try:
            return write_inspection(run, model, reading, corpus, split=self.split)
        except OSError as error:
            raise UsageError(one_line(error)) from error
