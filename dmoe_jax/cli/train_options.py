"""The flags of `dmoe train`, in groups, and their checks. Nothing here imports JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from dmoe_jax.cli.averaging_options import AveragingOptions
from dmoe_jax.cli.checks import check_at_least, check_needs, check_no_effect, check_seed
from dmoe_jax.cli.distributed import TrunkDevices
from dmoe_jax.cli.network import BudgetOptions, EndsWithInput, JoinTexts, ListenOptions, MemberOptions, MetricsOptions
from dmoe_jax.cli.sources import ConfigFile, changed, settings_of_run
from dmoe_jax.data.corpora import check_source
from dmoe_jax.data.tokenizers import check_tokenizer
from dmoe_jax.layer_config import LayerConfig, Recipe, Route
from dmoe_jax.mixture.config import MixtureConfig
from dmoe_jax.runs.endings import UsageError, mistakes_in_one_line
from dmoe_jax.runs.flags import Flag, as_flags, flag_of, flags_of, named_flags, settings_of


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Data of a run, and its trainers."""

    data: str = "auto"
    """Corpus of the language model: auto (WikiText-2 from DMOE_DATA, cache or download, else the embedded one),
    wikitext-2, embedded; or a text of your own: a file, or a folder with train.txt, valid.txt and test.txt; or a data
    set of the library datasets with a column text: a folder of save_to_disk, or hf:NAME or hf:NAME:CONFIG."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="FILE|NAME")] = None
    """Tokenizer of the language model: a tokenizer.json of Hugging Face, a .model of SentencePiece, a folder with one,
    or a name on the Hugging Face hub. Default: the text's words."""
    num_trainers: int = 4
    """Asynchronous trainers in this process."""
    batch_size: int = 4
    """Sequences of each trainer."""
    seed: int = 0
    """Seed of the trunk's initial parameters, and of all chance without --data-seed."""
    data_seed: int | None = None
    """Seed of the trainers' places in the data, of dropout and of the router's noise. Default: --seed."""
    init: Annotated[Path | None, tyro.conf.arg(metavar="EXPORT")] = None
    """Begin with the trunk of a model that dmoe export wrote, of the same sizes, words and router, and not with that of
    --seed; the same for all trainers that average. Nodes have an --init for its experts."""

    def check(self, *, more: int = 0) -> None:
        """Raise `UsageError` for a flag out of range; `more` is added to the seeds for the last process."""
        check_at_least(1, self, "num_trainers", "batch_size")
        check_seed(self, "seed", "data_seed", more=more)

    def check_text(self, model: str | None) -> None:
        """Raise `UsageError` for a text or tokenizer that cannot be had, or that the user's own model does not read."""
        if model and self.tokenizer is not None:
            raise UsageError(f"--tokenizer {self.tokenizer} would have no effect beside --model {model}")
        if model:
            return
        with mistakes_in_one_line():
            check_source(self.data)
            if self.tokenizer is not None:
                check_tokenizer(self.tokenizer)

    @property
    def chance_seed(self) -> int:
        """Seed of everything but the initial parameters."""
        return self.seed if self.data_seed is None else self.data_seed


@dataclass(frozen=True, kw_only=True)
class LanguageModelOptions:
    """The Transformer-XL, unless --model names another model."""

    layer: Annotated[LayerConfig, tyro.conf.arg(name="")] = field(default_factory=LayerConfig)
    """Shape of one expert."""
    route: Route = "sequence"
    """Unit that has experts of its own: a whole sequence, whose experts are layers; or each token, whose experts are
    the feed-forward networks of layers, while attention stays here. Nodes need the same --route. Of the routers
    expert_choice is not for tokens."""
    num_layers: int = 2
    """DMoE layers; layer i calls the experts under "layer<i>."."""
    grid_size: tuple[int, ...] = (4, 4)
    """Extents of each layer's expert grid."""
    router: str = "product_key"
    """Chooses the experts of each sequence or token: product_key, balanced, flat_top_k, noisy_top_k, switch,
    expert_choice, hash, frozen_random, peer, deepseek_v3 or uniform_random. Any with +balanced or +balance behind it:
    with a balancing bias, or loss; +balance=0.1 sets its weight. Or my_file.py:my_router: a router of your own, or a
    function that makes one for a grid size."""
    cutoffs: tuple[int, ...] | Literal["none"] = (2000, 10000)
    """Adaptive softmax: ids where a new cluster of rarer words begins; none for a plain softmax."""
    embedding_dropout: float = 0.0
    """Share of words whose input embedding is dropped in a step, at all their places."""
    input_dropout: float = 0.0
    """Locked dropout of the word vectors."""
    output_dropout: float = 0.0
    """Locked dropout before the softmax. (--dropout also acts on the last layer's output.)"""

    def check(self) -> None:
        """Raise `UsageError` for a flag out of range."""
        check_at_least(1, self, "num_layers")
        if not self.grid_size or min(self.grid_size) < 1:
            raise UsageError(f"--grid-size must be positive integers, got {self.grid_size}")

    def cutoffs_below(self, vocab_size: int) -> tuple[int, ...]:
        """Cutoffs that a vocabulary of this size has words beyond."""
        return () if self.cutoffs == "none" else tuple(cutoff for cutoff in self.cutoffs if cutoff < vocab_size)


@named_flags("k_best", "k_min", "grace_s", "timeout_s", "max_rows", "compression", "max_skipped", "wait_s")
@dataclass(frozen=True, kw_only=True)
class CallOptions(MixtureConfig):
    """Calls of experts; with --model, only --wait-s and --max-skipped count."""

    max_skipped: float = 0.5
    """Largest share of samples without any expert. If more of a layer's last 32 calls have none for ten seconds on end,
    the run ends with an error; if more of the whole run have none, it does so at its end. 1: never. With --model only
    the whole run counts: the model's own mixtures say how many of their last calls may fail."""
    wait_s: float = 300.0
    """Seconds to wait at the start for every layer to have a living expert."""


@named_flags(
    *("learning_rate", "warmup_steps", "floor", "grad_clip", "weight_decay", "staleness_power"),
    floor="learning_rate_floor",
)
@dataclass(frozen=True, kw_only=True)
class TrunkRecipe(Recipe):
    """Training of the trunk: Adam with a clipped gradient, warm-up and cosine decay over all of --steps."""

    learning_rate: float = 2e-3
    warmup_steps: int = 50
    total_steps: int | None = None
    floor: float = 0.1
    grad_clip: float = 0.5
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrunkOptions:
    """The trunk: its training, and its devices."""

    optimizer: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:NAME")] = None
    """Optimiser of the trunk: my_file.py:my_optimizer, an Optax transformation or a function without arguments that
    returns one, whose schedules count the updates of all trainers together. Default: Adam, with the step size and so on
    given here. (Experts learn with the --optimizer of their nodes.)"""
    recipe: Annotated[TrunkRecipe, tyro.conf.arg(name="")] = field(default_factory=TrunkRecipe)
    devices: Annotated[TrunkDevices, tyro.conf.arg(name="")] = field(default_factory=TrunkDevices)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Length of a run, its evaluations and its checkpoints."""

    steps: int = 600
    """Trunk updates to make, all trainers together."""
    max_minutes: float = 0.0
    """Stop after this many minutes even if there are steps left; 0 for no limit."""
    eval_every: int = 100
    """Trunk updates between evaluations on validation data."""
    eval_tokens: int = 16384
    """Validation tokens of each evaluation, read from evenly spaced places; 0 for the whole text. A model of your own
    is evaluated on all of its validation data."""
    final_eval_tokens: int = 0
    """Validation tokens of the last evaluation; 0 for the whole text."""
    checkpoint_every: int = 200
    """Trunk updates between checkpoints; one is also written at the end and after Ctrl-C."""

    def check(self) -> None:
        """Raise `UsageError` for a flag out of range."""
        check_at_least(1, self, "steps", "eval_every")
        check_at_least(0, self, "eval_tokens", "final_eval_tokens", "checkpoint_every", "max_minutes")


_CONSTANT = (
    *("model", "route", "num_layers", "grid_size", "router", "cutoffs", "d_model", "num_heads", "d_ff", "data"),
    *("optimizer", "average", "average_by_samples", "average_fragments"),
)
"""Settings that decide what is trained, or on what: a resumed run must have the same."""

_ON_OR_OFF = ("average_every", "target_batch_size", "weight_decay", "grad_clip")
"""Settings that a resumed run may change, but not switch on or off: the optimiser has a state for each that is on."""

_NO_SETTINGS = (
    *("--resume", "--trust-run", "--out", "--config", "--metrics-port", "--metrics-host", "--trace"),
    *("--distributed", "--num-processes", "--process-id"),
)
"""Flags that say nothing of what a run trains, and much of where it runs."""
_CALLS_OF_ANY_MODEL = ("wait_s", "max_skipped")
"""Settings of calls that count for a model of the user's own, too."""


@dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """Folder of a run."""

    out: Path | None = None
    """Run folder, the first one's where there are several trainer processes; new or empty unless --resume. Default:
    under runs/, by the time."""
    resume: bool = False
    """Go on with the run in --out from its latest checkpoint, with its flags; those that are given change. Experts are
    as their nodes have them, or have saved them."""
    trust_run: bool = False
    """With --resume or --config: run the Python files that the run in --out or the file names, such as its --router.
    Without it they must be named again."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Reports of a run."""

    metrics: Annotated[MetricsOptions, tyro.conf.arg(name="")] = field(default_factory=MetricsOptions)
    trace: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write a trace of expert calls and steps at the end, also after Ctrl-C: the last 100,000 of them, as JSON for
    ui.perfetto.dev or chrome://tracing."""
    tracker: Literal["wandb", "trackio", "tensorboard"] | None = None
    """Send the metrics to an experiment tracker, too. tensorboard's files are in the run folder."""
    json: bool = False
    """Print the headline figures as one JSON object on the last line."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """All flags of `dmoe train`."""

    join: JoinTexts
    """Peers to join through: HOST:PORT, PEERID@HOST:PORT to make sure who is there, or file:PATH, which lists some."""
    network: Annotated[MemberOptions, tyro.conf.arg(name="")] = field(default_factory=MemberOptions)
    folder: Annotated[FolderOptions, tyro.conf.arg(name="")] = field(default_factory=FolderOptions)
    model: str | None = None
    """A model of your own, as my_file.py:my_model: a function of the swarm that returns a `dmoe_jax.model.Model` which
    also has `batches(shard, num_shards, seed)`, an iterator of training batches, and perhaps `validation()`, an
    iterable. Default: a Transformer-XL language model."""
    language: Annotated[LanguageModelOptions, tyro.conf.arg(name="")] = field(default_factory=LanguageModelOptions)
    data: Annotated[DataOptions, tyro.conf.arg(name="")] = field(default_factory=DataOptions)
    calls: Annotated[CallOptions, tyro.conf.arg(name="")] = field(default_factory=CallOptions)
    trunk: Annotated[TrunkOptions, tyro.conf.arg(name="")] = field(default_factory=TrunkOptions)
    run_length: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)
    averaging: Annotated[AveragingOptions, tyro.conf.arg(name="")] = field(default_factory=AveragingOptions)
    listening: Annotated[ListenOptions, tyro.conf.arg(name="")] = field(default_factory=ListenOptions)
    """Address of this process, if it averages; one that does not listens nowhere."""
    budget: Annotated[BudgetOptions, tyro.conf.arg(name="")] = field(default_factory=BudgetOptions)
    report: Annotated[ReportOptions, tyro.conf.arg(name="")] = field(default_factory=ReportOptions)
    config: ConfigFile = None
    exit_on_stdin_eof: EndsWithInput = False

    def check(self) -> None:
        """Raise `UsageError` naming a flag that nothing else checks before it would be too late."""
        self.data.check()
        for beside, flags in self._without_effect().items():
            check_no_effect(beside, flags)
        self.trunk.devices.check()
        self.language.check()
        self.run_length.check()
        check_at_least(0, self.calls, "wait_s")
        self.data.check_text(self.model)
        if self.model is not None and self.data.init is not None:
            raise UsageError("--init is for the language model: it would have no effect beside --model")
        self.averaging.check()
        averaged = "--average-every or --target-batch-size without --average-client"
        check_needs(averaged, self.listens, flags_of(self.listening))
        if self.trunk.devices.distributed is not None:
            self._check_together()
        if self.report.trace is not None and self.report.trace.is_dir():
            raise UsageError(f"--trace names the file to write, {self.report.trace} is a folder")
        if not self.join:
            raise UsageError("--join needs at least one HOST:PORT")
        if self.folder.resume and self.folder.out is None:
            raise UsageError("--resume needs --out with the folder of the run to continue")
        if self.folder.trust_run and not self.folder.resume and self.config is None:
            raise UsageError("--trust-run would have no effect without --resume or --config")

    def _without_effect(self) -> dict[str, list[Flag]]:
        """The flags whose place others take, by the flag that takes it."""
        found: dict[str, list[Flag]] = {}
        if self.trunk.optimizer is not None:
            found[f"--optimizer {self.trunk.optimizer}"] = list(flags_of(self.trunk.recipe))
        if self.model is not None:
            calls = [flag for flag in flags_of(self.calls) if flag.field not in _CALLS_OF_ANY_MODEL]
            found[f"--model {self.model}, which has mixtures of its own"] = [*flags_of(self.language), *calls]
        return found

    @property
    def listens(self) -> bool:
        """True if others call this process: those that it averages with, or trains with as one."""
        return self.averaging.listens or self.trunk.devices.distributed is not None

    def _check_together(self) -> None:
        """Raise `UsageError` for flags that trainers of several processes do not know."""
        if self.data.num_trainers != 1:
            raise UsageError(
                f"--distributed makes one trainer of all processes: give --num-trainers 1, got {self.data.num_trainers}"
            )
        if self.averaging.meeting.client:
            raise UsageError("--average-client does not go together with --distributed: the processes call each other")
        if self.run_length.max_minutes:
            raise UsageError("--max-minutes does not go together with --distributed: give --steps")
        if self.run_length.checkpoint_every != RunOptions.checkpoint_every:
            line = "--checkpoint-every does not go together with --distributed, which saves every --eval-every"
            raise UsageError(line)

    def settings(self) -> dict[str, Any]:
        """The flags as plain data, for config.json."""
        idle = [flag.word for flags in self._without_effect().values() for flag in flags]
        settings = settings_of(self, without=(*_NO_SETTINGS, *idle))
        settings["averaging"]["average"] = self.averaging.kind.replace("_", "-")  # what "auto" comes to
        return settings

    @staticmethod
    def default_settings() -> dict[str, Any]:
        """Settings of a run without any flag, by the keys of their flags."""
        return settings_of_run(TrainOptions(join=()).settings())


def flags_of_run(saved: Mapping[str, Any]) -> list[str]:
    """Flags that a run was begun with, where they differ from the defaults; those that are none now are left out."""
    defaults = TrainOptions.default_settings()
    then = changed({key: value for key, value in settings_of_run(saved).items() if key in defaults}, defaults)
    return as_flags({key: "inf" if value is None else value for key, value in then.items()})


def check_changes(out: Path, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise `UsageError` naming the flag that the run in `out`, with `saved` in its config.json, cannot change."""
    # A run of an older version had what is the default now.
    before = TrainOptions.default_settings() | settings_of_run(saved)
    now = settings_of_run(settings)
    for key, is_now in now.items():
        was = before[key]
        line = f"the run in {out} was begun with {flag_of(key)} {was!r} and cannot be resumed with {is_now!r}"
        if key == "average_compression" and was != is_now and "top-k" in (was, is_now):
            raise UsageError(f"{line}: what top-k keeps for later is in the checkpoint")
        if (key in _CONSTANT and was != is_now) or (key in _ON_OR_OFF and bool(was) != bool(is_now)):
            raise UsageError(line)
