"""`dmoe export`: a trained model as safetensors files."""

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import trio
import tyro
from rich.console import Console

from dmoe_jax.cli.lifecycle import Stop, run_until_done
from dmoe_jax.cli.sources import ConfigFile
from dmoe_jax.machine.disk import check_local, url_of
from dmoe_jax.runs.endings import UsageError, mistakes_in_one_line
from dmoe_jax.runs.setting_up import set_up_jax
from dmoe_jax.runs.speech import say
from dmoe_jax.trained.export_files import SUFFIX, is_export, read_facts, vocabulary_folder
from dmoe_jax.trained.remote import local_copy
from dmoe_jax.trained.saved_run import find_run
from dmoe_jax.training.prepared_run import check_code, is_code

if TYPE_CHECKING:
    from dmoe_jax.trained.export_files import ExportFacts
    from dmoe_jax.trained.saved_model import SavedModel


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Write the parameters of a trained language model, trunk and experts, to a safetensors file for other tools.

    The names of the arrays, and the way back, are in docs/how_to/export.md.
    """

    run_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(name="run", metavar="RUN")]
    """Folder of a run of dmoe train, dmoe demo, dmoe up or experiments.transformer_xl, or an export; also at gs:// or
    s3://."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT.safetensors")]
    """File to write; with --split-experts the folder to make. Must not be there yet."""
    experts: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FOLDER [FOLDER ...]")] = ()
    """Folders in which the nodes of a swarm saved its experts, each one's --checkpoint-dir; also at gs:// or s3://.
    Default: those that lie beside the run. Without experts the trunk is exported alone."""
    checkpoint: Literal["last", "best"] | int = "last"
    """Checkpoint of the run: last, best (of the least loss in an evaluation on the way), or its step. Over a swarm it
    is the trunk's: the experts are as their nodes saved them last."""
    split_experts: bool = False
    """Write each expert to a file of its own, OUT/layer0.1.3.safetensors, and the rest to OUT/trunk.safetensors."""
    router: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:NAME")] = None
    """The run's router again, if it is out of a file of your own: no file is run only because a run names it."""
    trust_run: bool = False
    """Run the Python file that the run names for its router."""
    config: ConfigFile = None
    json: bool = False
    """Print what was written as one JSON object."""

    def run(self) -> int:
        return run_until_done(self._export)

    async def _export(self, stop: Stop) -> int:
        del stop  # cancelled as a whole: the file is written at once or not at all
        if find_spec("safetensors") is None:
            raise UsageError("dmoe export writes with safetensors, which is missing: pip install 'dmoe_jax[export]'")
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        with mistakes_in_one_line():
            self._check_out()
        set_up_jax()
        # In a thread, so that Ctrl-C is heard.
        with mistakes_in_one_line():
            written = await trio.to_thread.run_sync(partial(self._write, console), abandon_on_cancel=True)
        console.print(f"{self.out}: {written['arrays']} arrays of {written['bytes']:,} bytes")
        if self.json:
            say(json.dumps(written))
        return 0

    def _check_out(self) -> None:
        check_local(self.out, "an export")
        if (self.out.suffix == SUFFIX) == self.split_experts:
            wanted = "be a name for a folder" if self.split_experts else f"end in {SUFFIX}"
            raise ValueError(f"OUT must {wanted}, got {self.out}")
        for path in {self.out, vocabulary_folder(self.out)}:
            if path.exists():
                raise ValueError(f"{path} is there already")

    def _write(self, console: Console) -> dict[str, Any]:
        from dmoe_jax.trained.exporting import write_export

        with ExitStack() as stack:
            folder = stack.enter_context(local_copy(self.run_folder))
            nodes = [stack.enter_context(local_copy(each)) for each in self.experts]
            model, facts, vocabulary = self._read(folder, nodes)
            known, num_experts = int(model.known.sum()), model.known.size
            source = url_of(self.run_folder) or self.run_folder
            console.print(f"{source}: step {model.step}, {known} of {num_experts} experts")
            if not known:
                console.print("its experts are not here: --experts FOLDER ... names where the nodes saved them")
            arrays = write_export(model, facts, self.out, split=self.split_experts, vocabulary=vocabulary)
        path = vocabulary_folder(self.out) / "vocabulary.json"
        files = sorted(self.out.glob(f"*{SUFFIX}")) if self.split_experts else [self.out]
        return {
            "out": str(self.out),
            "step": model.step,
            "experts": known,
            "of_experts": num_experts,
            "arrays": len(arrays),
            "files": len(files),
            "bytes": sum(file.stat().st_size for file in files),
            "vocabulary": str(path) if path.exists() else None,
        }

    def _read(self, folder: Path, nodes: list[Path]) -> "tuple[SavedModel, ExportFacts, Path]":
        """The model, its facts, and the folder of its vocabulary."""
        from dmoe_jax.trained.exporting import facts_of, words_of_checkpoint
        from dmoe_jax.trained.imported import read_export
        from dmoe_jax.trained.saved_model import load_model

        if is_export(folder):
            if nodes or self.checkpoint != "last":
                raise ValueError(f"--experts and --checkpoint would have no effect: {self.run_folder} is an export")
            model = read_export(folder, router=self.router, trust=self.trust_run)
            return model, read_facts(folder), vocabulary_folder(folder)
        run = find_run(folder, unfinished=True)
        if self.router is not None and not is_code(run.router):
            raise ValueError(f"--router would have no effect: that of the run is {run.router}")
        run = replace(run, router=self.router or run.router)
        if not self.trust_run:
            check_code(self.run_folder, [run.router], named=[self.router or ""])
        model = load_model(run, words_of_checkpoint(run, self.checkpoint), nodes, self.checkpoint)
        return model, facts_of(run, model), run.path
