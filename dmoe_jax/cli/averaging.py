"""The flags of `dmoe train` for averaging with other trainer processes, and what they set up."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from dmoe_jax.cli.checks import check_at_least, check_needs, check_positive
from dmoe_jax.runs.endings import UsageError
from net.averaging.grouping.group_key import check_prefix

if TYPE_CHECKING:
    import optax

    from dmoe_jax.averaging import Round, TreeAverager, TreeAveragerConfig
    from dmoe_jax.averaging.settings import CompressionName
    from dmoe_jax.collaboration import CollaborationConfig
    from dmoe_jax.device import Device
    from dmoe_jax.optim.compression import ErrorFeedback
    from dmoe_jax.trunk import SharedTrunk
    from net.averaging.speeds import Speeds
    from net.dht.node import DhtNode
    from net.rpc.base import Caller

_BYTES_IN_A_MEGABIT = 125_000.0


@dataclass(frozen=True, kw_only=True)
class AveragingOptions:
    """Whether and how this process's trunk is kept together with those of others."""

    average_every: int = 0
    """Trunk updates between two averages with other trainer processes of the swarm; 0: never. Give each process its own
    --data-seed. One that joins late takes the state of the one that is furthest."""
    target_batch_size: int = 0
    """Train with one large batch of this many tokens (samples of your own --model), which all processes with this flag
    gather together; 0: each process steps by itself. Whoever joins, leaves or is slow, --steps and schedules count the
    steps of all. With --average parameters or pseudo-gradients processes step by themselves in between."""
    average: Literal["auto", "parameters", "gradients", "pseudo-gradients", "noloco"] = "auto"
    """What is averaged, the same for all processes: parameters as they are; accumulated gradients, with one step of the
    optimiser for each average; or how far parameters came since the last average, which an outer optimiser takes as a
    gradient (DiLoCo). noloco: the latter with parameters drawn together as well, for groups that are small: see
    --average-side 2 and --average-dims. auto: parameters, but with --target-batch-size gradients."""
    average_share: float = 1.0
    """Of the parameters, drawn anew for each group, that are averaged, such as 0.005 every update (SPARTA); the same
    for all processes."""
    average_fragments: int = 1
    """With pseudo-gradients: parts of the model that are averaged by turns, each every --average-every updates, while
    training goes on (Streaming DiLoCo); the same for all processes."""
    average_name: str = "trunk"
    """Processes that give the same name average with each other."""
    average_by_samples: bool = True
    """Whether a process counts by the samples that it has seen since its last average, or all count alike, as they
    always do with noloco and with --average-fragments."""
    average_side: int = 4
    """Processes in a full group, the same for all."""
    average_dims: int = 1
    """Axes of the grid of processes: with 1 all are one group, with 2 and side M there are M groups of M in turn."""
    average_window_s: float = 5.0
    """How long a group waits for more members, seconds; a full one begins at once."""
    average_timeout_s: float = 30.0
    """Longest that a round takes, seconds; training goes on meanwhile."""
    average_client: bool = False
    """Average without being called by others: for a machine that cannot be reached. Others must do the work."""
    average_up: float = 0.0
    """Megabits a second that this machine can send, for its share of the work; 0: it is measured."""
    average_down: float = 0.0
    """Megabits a second that it can receive; 0: it is measured."""
    average_compression: Literal["none", "float16", "bfloat16", "blockwise8", "top-k"] = "none"
    """How numbers travel. With --target-batch-size all processes make the same step whatever is lost on the way. top-k:
    the largest of each block in a few bits, the rest is kept for later (error feedback, SparseLoCo); for gradients and
    pseudo-gradients with --average-every, the same for all processes."""
    average_kept: int = 64
    """With top-k: values that travel of each block of 4,096, the same for all."""
    average_value_bits: Literal[2, 4] = 2
    """With top-k: bits of a value that travels, with its sign; the same for all."""
    average_residual_decay: float = 0.95
    """With top-k: what is left from one average to the next of what did not travel, 0 to 1."""
    outer_learning_rate: float | None = None
    """Step size of the outer optimiser, which only pseudo-gradients have. Default: 0.7, with top-k 1, with
    --average-fragments 0.4."""
    outer_momentum: float | None = None
    """Nesterov momentum of the outer optimiser. Default: 0.9, with top-k 0: what is kept for later takes its place."""

    def check(self) -> None:
        """Refuse flags that cannot be meant.

        Raises:
          UsageError: naming the flag.
        """
        if self.average_every < 0:
            raise UsageError(f"--average-every must not be negative, got {self.average_every}")
        if self.target_batch_size < 0:
            raise UsageError(f"--target-batch-size must not be negative, got {self.target_batch_size}")
        if self.target_batch_size and self.average_every:
            raise UsageError("--target-batch-size says when to average: leave --average-every out")
        check_at_least(2, self, "average_side")
        check_positive(self, "average_window_s", "average_timeout_s")
        if self.outer_learning_rate is not None:
            check_positive(self, "outer_learning_rate")
        if self.outer_momentum is not None and not 0 <= self.outer_momentum < 1:
            raise UsageError(f"--outer-momentum must be at least 0 and below 1, got {self.outer_momentum}")
        self._check_sparse()
        self._check_method()
        for needed, is_there, names in self._needs():
            check_needs(needed, is_there, self, *names)
        try:
            check_prefix(
                self.average_name if self.average_fragments == 1 else f"{self.average_name}-{self.average_fragments}"
            )
            self.config()
            self.feedback()
            if self.target_batch_size:
                self.collaboration()
        except ValueError as error:
            raise UsageError(f"--average-...: {error}") from error

    def _check_sparse(self) -> None:
        """Refuse top-k where the largest values alone are of no use.

        Raises:
          UsageError: naming the flag.
        """
        if not self.is_sparse:
            return
        if self.target_batch_size:
            raise UsageError(
                "--average-compression top-k is for --average-every: a batch of --target-batch-size is reduced, not "
                "gathered; take blockwise8 there"
            )
        if self.average_every and self.kind == "parameters":
            raise UsageError(
                "--average-compression top-k is for --average gradients or pseudo-gradients: the largest parameters "
                "alone are no model"
            )

    def _check_method(self) -> None:
        """Refuse what belongs to another method of averaging.

        Raises:
          UsageError: naming the flag.
        """
        check_at_least(1, self, "average_fragments")
        if not 0 < self.average_share <= 1:
            raise UsageError(f"--average-share must be above 0 and at most 1, got {self.average_share}")
        if self.average_share < 1 and (self.kind != "parameters" or self.target_batch_size):
            raise UsageError("--average-share is for --average parameters with --average-every")
        if self.average_fragments > 1 and (self.kind != "pseudo_gradients" or self.target_batch_size):
            raise UsageError("--average-fragments is for --average pseudo-gradients with --average-every")
        if self.average_every and self.average_fragments > self.average_every:
            raise UsageError(
                f"--average-fragments {self.average_fragments} cannot each have a turn within --average-every "
                f"{self.average_every} updates"
            )
        if self.average == "noloco" and self.target_batch_size:
            raise UsageError("--average noloco is for --average-every: with --target-batch-size all step together")
        if self.is_sparse and (self.average == "noloco" or self.average_fragments > 1):
            raise UsageError("--average-compression top-k is for gradients or pseudo-gradients of the whole model")

    def _needs(self) -> Iterator[tuple[str, bool, tuple[str, ...]]]:
        """Flags that do something only with another one: (the other one, True if it is given, the fields)."""
        every, together = bool(self.average_every), bool(self.target_batch_size)
        how = ("average_window_s", "average_timeout_s", "average_client", "average_up", "average_down")
        names = ("average", "average_compression", "average_name", "average_side", *how)
        yield "--average-every or --target-batch-size", every or together, names
        alone = ("average_share", "average_fragments", "average_by_samples", "average_dims")
        yield "--average-every", every, alone
        kept = ("average_kept", "average_value_bits", "average_residual_decay")
        yield "--average-compression top-k", self.is_sparse, kept
        outer = ("outer_learning_rate", "outer_momentum")
        yield "--average pseudo-gradients", self.kind == "pseudo_gradients", outer

    @property
    def is_sparse(self) -> bool:
        """Whether only the largest values travel."""
        return self.average_compression == "top-k"

    def feedback(self) -> "ErrorFeedback | None":
        """How few values travel; None: all do.

        Raises:
          ValueError: a setting is out of range.
        """
        if not self.is_sparse:
            return None
        from dmoe_jax.optim.compression import ErrorFeedback
        from net.wire.sparse import SparseCoding

        coding = SparseCoding(kept=self.average_kept, bits=self.average_value_bits)
        return ErrorFeedback(coding=coding, decay=self.average_residual_decay)

    def config(self) -> "TreeAveragerConfig":
        """The averager's settings.

        Raises:
          ValueError: one of them is out of range.
        """
        from dmoe_jax.averaging import TreeAveragerConfig

        return TreeAveragerConfig(
            side=self.average_side,
            dims=self.average_dims,
            window_s=self.average_window_s,
            timeout_s=self.average_timeout_s,
            compression=self._codec,
            share=self.average_share,
            role="client" if self.average_client else "auto",
            speeds=speeds_of(self.average_up, self.average_down),
        )

    @property
    def _codec(self) -> "CompressionName":
        """How numbers travel where all do."""
        return "none" if self.average_compression == "top-k" else self.average_compression

    @property
    def kind(self) -> Literal["parameters", "gradients", "pseudo_gradients", "noloco"]:
        """What is averaged."""
        if self.average == "auto":
            return "gradients" if self.target_batch_size else "parameters"
        return "pseudo_gradients" if self.average == "pseudo-gradients" else self.average

    @property
    def listens(self) -> bool:
        """Whether others call this process."""
        return bool(self.average_every or self.target_batch_size) and not self.average_client

    def outer(self) -> "optax.GradientTransformation | None":
        """The outer optimiser, which only pseudo-gradients have."""
        import optax

        if self.kind != "pseudo_gradients":
            return None
        rate, momentum = (1.0, 0.0) if self.is_sparse else (0.4 if self.average_fragments > 1 else 0.7, 0.9)
        rate = rate if self.outer_learning_rate is None else self.outer_learning_rate
        momentum = momentum if self.outer_momentum is None else self.outer_momentum
        # Without a momentum there is no state of it, which would be as large as the parameters. An explicit 0 has one,
        # as checkpoints of earlier versions do.
        plain = self.is_sparse and self.outer_momentum is None
        return optax.sgd(rate, momentum=None if plain else momentum, nesterov=not plain)

    def collaboration(self) -> "CollaborationConfig":
        """How this process takes part in one large batch.

        Raises:
          ValueError: a setting is out of range.
        """
        from dmoe_jax.collaboration import CollaborationConfig

        return CollaborationConfig(
            target_batch_size=self.target_batch_size,
            lead_s=self.average_window_s,
            timeout_s=self.average_timeout_s,
            role="client" if self.average_client else "auto",
            speeds=speeds_of(self.average_up, self.average_down),
            compression=self._codec,
        )

    def wrap(self, inner: "optax.GradientTransformation") -> "optax.GradientTransformation":
        """The trunk's optimiser: `inner`, averaged with others' as these flags say; without averaging, as it is."""
        if not self.average_every:
            return inner
        from dmoe_jax.optim import moshpit_average, noloco, streaming_diloco

        if self.kind == "noloco":
            return noloco(inner, every=self.average_every)
        if self.average_fragments > 1:
            return streaming_diloco(
                inner, every=self.average_every, fragments=self.average_fragments, outer=self.outer()
            )
        return moshpit_average(
            inner,
            every=self.average_every,
            what=self.kind,
            outer=self.outer(),
            weighted=self.average_by_samples,
            compress=self.feedback(),
        )


def speeds_of(up: float, down: float) -> "Speeds":
    """What the flags say of this machine's line, in megabits a second; 0: unknown.

    Raises:
      ValueError: one of them is out of range.
    """
    from net.averaging.speeds import Speeds

    return Speeds(up=up * _BYTES_IN_A_MEGABIT if up else None, down=down * _BYTES_IN_A_MEGABIT if down else None)


@asynccontextmanager
async def open_averaging(
    options: AveragingOptions,
    rpc: "Caller",
    dht: "DhtNode",
    trunk: "SharedTrunk",
    device: "Device",
    say: Callable[[str], None],
    *,
    meaning: str,
    max_step: int,
    on_round: "Callable[[Round], None]" = lambda done: None,
) -> "AsyncIterator[TreeAverager | None]":
    """This process's averaging, caught up with others that are ahead; None if there is to be none.

    Args:
      trunk: its optimiser was made by `options.wrap`.
      say: tells the user. meaning: of the model, see `Model.meaning`.
      max_step: where the run ends.
      on_round: called after each round.

    Raises:
      ValueError: a setting is out of range.
    """
    if not options.average_every:
        yield None
        return
    from dmoe_jax.trunk import open_trunk_averaging

    async with open_trunk_averaging(
        rpc,
        dht,
        trunk,
        name=options.average_name,
        config=replace(options.config(), meaning=meaning),
        max_step=max_step,
        device=device,
        on_round=on_round,
    ) as averager:
        if await trunk.catch_up(min_lead=options.average_every, max_step=max_step):
            say(f"took the state of a process that was ahead: step {trunk.step}")
        elif averager.why_not:
            say(f"{averager.why_not}; training alone until then")
        yield averager
