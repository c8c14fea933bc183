"""`dmoe train`: asynchronous trainers of a Transformer-XL over the swarm's experts."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import trio
import tyro

from dmoe_jax.cli.averaging import AveragingOptions
from dmoe_jax.cli.common import UsageError, set_up_jax
from dmoe_jax.cli.lifecycle import Stop, run_until_done
from dmoe_jax.cli.network import JoinTexts, ListenOptions, NetworkOptions
from dmoe_jax.cli.swarm import join_swarm
from dmoe_jax.layer_config import LayerConfig


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a DMoE Transformer-XL language model over a swarm, with several asynchronous trainers in this process.

    The run folder holds config.json, metrics.jsonl, figure.png and report.md, also after Ctrl-C.
    """

    join: JoinTexts
    """Peers to join through, as HOST:PORT, or PEERID@HOST:PORT to make sure who is there."""
    network: Annotated[NetworkOptions, tyro.conf.arg(name="")] = field(default_factory=NetworkOptions)
    """Who this process is and which swarm it belongs to."""
    out: Path | None = None
    """Run folder; must be new or empty unless --resume. Default: runs/ and the time."""
    resume: bool = False
    """Continue the run in --out from its latest checkpoint. The experts are as their nodes have them now."""
    checkpoint_every: int = 200
    """Trunk updates between checkpoints; one is also written at the end and after Ctrl-C."""
    data: Literal["auto", "wikitext-2", "embedded"] = "auto"
    """Corpus: auto (DMOE_DATA, cache, download, else the embedded one), wikitext-2, or embedded."""
    num_trainers: int = 4
    """Asynchronous trainers in this process."""
    batch_size: int = 4
    """Sequences of each trainer."""
    steps: int = 600
    """Trunk updates to make, all trainers together."""
    max_minutes: float = 0.0
    """Stop after this many minutes even if there are steps left; 0 for no limit."""
    expert: Annotated[LayerConfig, tyro.conf.arg(name="")] = field(default_factory=LayerConfig)
    """Shape of one expert."""
    embedding_dropout: float = 0.0
    """Share of words whose input embedding is dropped in a step, at all their places."""
    input_dropout: float = 0.0
    """Locked dropout of the word vectors."""
    output_dropout: float = 0.0
    """Locked dropout before the softmax. (--dropout also acts on the last layer's output.)"""
    num_layers: int = 2
    """DMoE layers; layer i calls the experts under "layer<i>."."""
    grid_size: tuple[int, ...] = (4, 4)
    """Extents of each layer's expert grid."""
    router: str = "product_key"
    """Chooses the experts of each sequence: product_key, flat_top_k, noisy_top_k, switch, expert_choice, hash,
    frozen_random, peer or uniform_random. Or my_file.py:my_router: a router of your own, or a function that makes one
    for a grid size."""
    cutoffs: tuple[int, ...] = (2000, 10000)
    """Adaptive softmax: ids where a new cluster of rarer words begins. None for a plain softmax."""
    k_best: int = 4
    """Experts asked for each sequence."""
    k_min: int = 1
    """Answers that each sequence needs before stragglers get only the grace time."""
    grace_s: float = 1.0
    """Seconds to wait for stragglers then."""
    timeout_s: float = 10.0
    """Seconds after which an expert call is given up."""
    compression: Literal["none", "float16", "bfloat16", "blockwise8"] = "none"
    """How activations and gradients travel to experts and back. Parameters never travel compressed."""
    learning_rate: float = 2e-3
    """Peak step size of the trunk's Adam."""
    warmup_steps: int = 50
    """Trunk updates of linear warm-up, at most a quarter of --steps; cosine decay follows."""
    learning_rate_floor: float = 0.1
    """Where the decay ends, as a share of the peak; 0 to 1."""
    grad_clip: float = 0.5
    """Bound on the norm of the trunk's gradient."""
    weight_decay: float = 0.0
    """L2 penalty on the trunk's parameters, added to their gradients before Adam."""
    eval_every: int = 100
    """Trunk updates between evaluations on validation text."""
    eval_tokens: int = 16384
    """Validation tokens of each evaluation, read from evenly spaced places; 0 for the whole text."""
    final_eval_tokens: int = 0
    """Validation tokens of the last evaluation; 0 for the whole text."""
    averaging: Annotated[AveragingOptions, tyro.conf.arg(name="")] = field(default_factory=AveragingOptions)
    """Averaging with other trainer processes."""
    listening: Annotated[ListenOptions, tyro.conf.arg(name="")] = field(default_factory=ListenOptions)
    """Where others call this process, if it averages; one that does not listens nowhere."""
    seed: int = 0
    """Seed of the trunk's initial parameters, and of all chance without --data-seed."""
    data_seed: int | None = None
    """Seed of the trainers' places in the text, of dropout and of the router's noise. Default: --seed."""
    swarm: str = "dmoe"
    """Name of the swarm."""
    json: bool = False
    """Print the headline figures as one JSON object on the last line."""
    exit_on_stdin_eof: bool = False
    """End when standard input closes (set by a process that starts this one and may be killed)."""

    def run(self) -> int:
        """Train; the exit status."""
        return run_until_done(self._train, exit_on_stdin_eof=self.exit_on_stdin_eof)

    async def _train(self, stop: Stop) -> int:
        del stop  # a cancelled run writes its report by itself
        self._check()
        set_up_jax()
        from dmoe_jax.cli.assembly import checked_router
        from dmoe_jax.cli.training import run_training

        # In a thread: a file of the user's may import anything.
        router = await trio.to_thread.run_sync(checked_router, self, abandon_on_cancel=True)
        listen = self.listening if self.averaging.average_every and not self.averaging.average_client else None
        async with join_swarm(self.network, join=self.join, listen=listen) as peer:
            return await run_training(self, peer, router)

    def _check(self) -> None:
        positive = (
            "num_trainers",
            "batch_size",
            "steps",
            "num_layers",
            "k_best",
            "eval_every",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.eval_tokens < 0 or self.final_eval_tokens < 0:
            raise UsageError("--eval-tokens and --final-eval-tokens must not be negative")
        if not 0 <= self.learning_rate_floor <= 1:
            raise UsageError(f"--learning-rate-floor must be from 0 to 1, got {self.learning_rate_floor}")
        if not self.weight_decay >= 0:
            raise UsageError(f"--weight-decay must not be negative, got {self.weight_decay}")
        self.averaging.check()
        if not self.join:
            raise UsageError("--join needs at least one HOST:PORT")
        if self.resume and self.out is None:
            raise UsageError("--resume needs --out with the folder of the run to continue")
        if self.k_min > self.k_best:
            raise UsageError(f"--k-min must not exceed --k-best, got {self.k_min} and {self.k_best}")
        if not self.grid_size or min(self.grid_size) < 1:
            raise UsageError(f"--grid-size must be positive integers, got {self.grid_size}")

    def settings(self) -> dict[str, object]:
        """The flags as plain data, for config.json."""
        return asdict(self)
