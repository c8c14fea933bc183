"""`dmoe evaluate`: the perplexity of a trained model, as papers report it."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from dmoe_jax.cli.checks import check_at_least, text_of
from dmoe_jax.cli.lifecycle import Stop, run_until_done
from dmoe_jax.cli.sources import ConfigFile
from dmoe_jax.cli.trained_options import TrainedModelOptions
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.report import unit_of
from dmoe_jax.runs.run_folder import plain
from dmoe_jax.runs.speech import say, shown
from dmoe_jax.trained.export_files import SUFFIX, is_export
from dmoe_jax.training.progress import TrainingProgress

if TYPE_CHECKING:
    from dmoe_jax.trained.evaluation import TextEvaluation
    from dmoe_jax.trained.saved_model import SavedModel


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand(TrainedModelOptions):
    """Tell the perplexity of a trained language model on a whole text, with its frequent and rare words by themselves.

    The text is the test part of the one that it was trained on.
    """

    split: Literal["test", "valid", "train"] = "test"
    """Part of the text that the model reads, to its end."""
    text: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A text of your own to read instead, in the words that the model knows."""
    rows: int = 16
    """Equal parts of it that are read side by side; each begins without a memory. 1 is most exact, and slow."""
    mem_len: int | None = None
    """Hidden states of earlier segments that a layer attends to, in place of those of training."""
    clamp_len: int | None = None
    """Distances above it count as this one, in place of the limit in training."""
    config: ConfigFile = None
    json: bool = False
    """Print the figures as one JSON object."""

    def run(self) -> int:
        return run_until_done(self._evaluate)

    async def _evaluate(self, stop: Stop) -> int:
        del stop  # cancelled as a whole: it leaves no trace
        check_at_least(1, self, "rows")
        if self.text is not None and self.split != "test":
            raise UsageError(f"--split {self.split} would have no effect beside --text {self.text}")
        for name, value in (("--mem-len", self.mem_len), ("--clamp-len", self.clamp_len)):
            if self.join and value is not None:
                raise UsageError(f"{name} {value} beside --join: experts of a swarm keep the lengths of training")
        if self.text is None and self.data is None:
            self._check_text_known()
        name = self.split if self.text is None else str(self.text)
        with TrainingProgress(0) as progress, progress.evaluation(f"{self.model_name} on {name}") as on_batch:
            async with self.opened(lambda m: m.with_lengths(mem_len=self.mem_len, clamp_len=self.clamp_len)) as model:
                text = model.split(self.split) if self.text is None else text_of("--text", self.text)
                found = await model.evaluate(text, rows=self.rows, on_batch=on_batch)
        if self.json:
            told = {"model": self.model_name, **self._origin(model.saved), "text": name, **_figures(found)}
            say(json.dumps(plain(told)))
        else:
            console = Console(soft_wrap=True, highlight=False, markup=False)
            console.print(shown(f"{self._origin_text(model.saved)}: {name}", one_line=True))
            console.print(_table(found, unit_of(model.vocabulary.meaning)))
        return 0

    def _origin(self, saved: "SavedModel") -> dict[str, Any]:
        """The place that the model's parameters are from; the checkpoint is None where there are not several."""
        return {
            "run": self.run_folder,
            "checkpoint": self.checkpoint if saved.is_checkpoint else None,
            "step": saved.step,
            "experts": None if self.join else int(saved.known.sum()),
            "of_experts": saved.known.size,
        }

    def _origin_text(self, saved: "SavedModel") -> str:
        swarm = f"swarm {self.network.swarm!r}"
        parts = [swarm if self.run_folder is None else str(self.run_folder)]
        if saved.is_checkpoint:
            parts.append(f"{self.checkpoint} checkpoint" if isinstance(self.checkpoint, str) else "checkpoint")
        experts = f"experts of {swarm}" if self.join else f"{saved.known.sum()} of {saved.known.size} experts"
        return ", ".join([*parts, f"step {saved.step:,}", experts])

    def _check_text_known(self) -> None:
        run = self.run_folder
        if run is not None and (run.suffix == SUFFIX or is_export(run)):
            what = f"the export {run}"
        elif run is None and self.join:
            what = "a swarm"
        else:
            return
        raise UsageError(f"{what} does not say where its text is: name it with --data, or a text of your own: --text")


def _figures(found: "TextEvaluation") -> dict[str, Any]:
    ranges = [{**asdict(each), "perplexity": each.perplexity} for each in found.by_rank]
    own = {"perplexity": found.perplexity, "loss": found.loss, "bits": found.bits, "tokens": found.tokens}
    return {**own, "by_rank": ranges}


def _table(found: "TextEvaluation", unit: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(f"{unit} by frequency")
    for column in ("targets", "perplexity", "bits"):
        table.add_column(column, justify="right")
    for each in found.by_rank:
        figures = (f"{x:.4g}" if each.tokens else "-" for x in (each.perplexity, each.loss / math.log(2)))
        table.add_row(f"{each.first + 1:,} to {each.stop:,}", f"{each.tokens:,}", *figures)
    table.add_row("all", f"{found.tokens:,}", f"{found.perplexity:.4g}", f"{found.bits:.4g}", style="bold")
    return table
