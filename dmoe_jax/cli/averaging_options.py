"""Flags for averaging with other trainer processes, and the settings that they stand for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from dmoe_jax.cli.checks import check_at_least, check_needs
from dmoe_jax.runs.endings import UsageError, mistakes_in_one_line
from dmoe_jax.runs.flags import Flag, flags_of, named_flags
from dmoe_net.averaging.grouping.group_key import check_prefix
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.wire.sparse import SparseCoding

if TYPE_CHECKING:
    import optax

    from dmoe_jax.averaging import TreeAveragerConfig
    from dmoe_jax.collaboration import CollaborationConfig
    from dmoe_jax.optim.compression import ErrorFeedback

_BYTES_IN_A_MEGABIT = 125_000.0


@dataclass(frozen=True, kw_only=True)
class MeetingOptions:
    """A process's rounds of averaging with others, and the speed of its line."""

    name: str = "trunk"
    """Processes that give the same name average with each other."""
    window_s: float = 5.0
    """Seconds that a group waits for more members, the same for all; a full one begins at once."""
    timeout_s: float = 30.0
    """Longest that a round takes, seconds, the same for all; training goes on meanwhile."""
    up: float = 0.0
    """Megabits a second that this machine can send, for its share of the work; 0: unknown."""
    down: float = 0.0
    """Megabits a second that it can receive; 0: unknown."""

    def speeds(self) -> Speeds:
        """Known speeds of this machine's line. Raises ValueError if one is out of range."""
        up, down = (each * _BYTES_IN_A_MEGABIT if each else None for each in (self.up, self.down))
        return Speeds(up=up, down=down)


@named_flags(prefix="average-")
@dataclass(frozen=True, kw_only=True)
class TrainerMeetingOptions(MeetingOptions):
    """The same for trainers, which make up the groups."""

    side: int = 4
    """Processes in a full group, the same for all."""
    dims: int = 1
    """Axes of the grid of processes: with 1 all are one group, with 2 and side M there are M groups of M in turn."""
    client: bool = False
    """Average without being called by others: for a machine that cannot be reached. Others must do the work."""


_CODING = SparseCoding()


@named_flags(prefix="average-")
@dataclass(frozen=True, kw_only=True)
class SparseOptions:
    """Values that travel with top-k."""

    kept: int = _CODING.kept
    """With top-k: values that travel of each block of 4,096, the same for all."""
    value_bits: Literal[2, 4] = 2
    """With top-k: bits of a value that travels, with its sign; the same for all."""
    residual_decay: float = 0.95
    """With top-k: share of what did not travel that is kept for the next average, 0 to 1."""

    def feedback(self) -> "ErrorFeedback":
        """Settings for the optimiser. Raises ValueError if one is out of range."""
        from dmoe_jax.optim.compression import ErrorFeedback

        return ErrorFeedback(coding=replace(_CODING, kept=self.kept, bits=self.value_bits), decay=self.residual_decay)


@named_flags(prefix="outer-")
@dataclass(frozen=True, kw_only=True)
class OuterOptions:
    """The outer optimiser of pseudo-gradients, SGD with Nesterov's momentum."""

    learning_rate: float | None = None
    """Step size of the outer optimiser, which only pseudo-gradients have. Default: 0.7, with top-k 1, with
    --average-fragments 0.4."""
    momentum: float | None = None
    """Nesterov momentum of the outer optimiser. Default: 0.9, with top-k 0: what is kept for later takes its place."""

    def __post_init__(self) -> None:
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"--outer-learning-rate must be positive, got {self.learning_rate}")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"--outer-momentum must be at least 0 and below 1, got {self.momentum}")


@dataclass(frozen=True, kw_only=True)
class AveragingOptions:
    """Averaging of this process's trunk with the trunks of others."""

    average_every: int = 0
    """Trunk updates between two averages with other trainer processes of the swarm; 0: never. Give each process its own
    --data-seed. One that joins late takes the state of the one that is furthest."""
    target_batch_size: int = 0
    """Train with one large batch of this many tokens (samples of your own --model), which all processes with this flag
    gather together; 0: each process steps by itself. Whoever joins, leaves or is slow, --steps and schedules count the
    steps of all. With --average parameters or pseudo-gradients processes step by themselves in between."""
    average: Literal["auto", "parameters", "gradients", "pseudo-gradients", "noloco"] = "auto"
    """Numbers that are averaged, the same for all processes: parameters as they are; accumulated gradients, with one
    step of the optimiser for each average; or how far parameters came since the last average, which an outer optimiser
    takes as a gradient (DiLoCo). noloco: the latter with parameters drawn together as well, for small groups: see
    --average-side 2 and --average-dims. auto: parameters, but with --target-batch-size gradients."""
    average_share: float = 1.0
    """Share of the parameters, drawn anew for each group, that is averaged, such as 0.005 every update (SPARTA); the
    same for all processes."""
    average_fragments: int = 1
    """With pseudo-gradients: parts of the model that are averaged by turns, each every --average-every updates, while
    training goes on (Streaming DiLoCo); the same for all processes."""
    average_by_samples: bool = True
    """Each process counts by the samples that it has seen since its last average; with --no-average-by-samples all
    count alike, as they always do with noloco and with --average-fragments."""
    average_compression: Literal["none", "float16", "bfloat16", "blockwise8", "top-k"] = "none"
    """Form of numbers on the wire. With --target-batch-size all processes make the same step whatever it loses. top-k:
    the largest of each block in a few bits, the rest is kept for later (error feedback, SparseLoCo); for gradients and
    pseudo-gradients with --average-every, the same for all processes."""
    meeting: Annotated[TrainerMeetingOptions, tyro.conf.arg(name="")] = field(default_factory=TrainerMeetingOptions)
    sparse: Annotated[SparseOptions, tyro.conf.arg(name="")] = field(default_factory=SparseOptions)
    outer: Annotated[OuterOptions, tyro.conf.arg(name="")] = field(default_factory=OuterOptions)

    def check(self) -> None:
        """Raise `UsageError` naming a flag that cannot be meant."""
        check_at_least(0, self, "average_every", "target_batch_size")
        check_at_least(1, self, "average_fragments")
        for line, is_so in self._misfits().items():
            if is_so:
                raise UsageError(line)
        for needed, is_there, flags in self._needs():
            check_needs(needed, is_there, flags)
        name = self.meeting.name
        with mistakes_in_one_line("--average-..."):
            check_prefix(name if self.average_fragments == 1 else f"{name}-{self.average_fragments}")
            self.config()
            self.sparse.feedback()
            if self.target_batch_size:
                self.collaboration()

    def _misfits(self) -> Mapping[str, bool]:
        """Lines that refuse flags of another method of averaging -> True if they are given."""
        every, together, sparse = bool(self.average_every), bool(self.target_batch_size), self.is_sparse
        share, parts = self.average_share, self.average_fragments
        top_k = "--average-compression top-k is for"
        turns = f"{parts} cannot each have a turn within --average-every {self.average_every} updates"
        return {
            "--target-batch-size says when to average: leave --average-every out": every and together,
            f"{top_k} --average-every: a batch of --target-batch-size is reduced, not gathered; take blockwise8": (
                sparse and together
            ),
            f"{top_k} --average gradients or pseudo-gradients: the largest parameters alone are no model": (
                sparse and every and self.kind == "parameters"
            ),
            f"{top_k} gradients or pseudo-gradients of the whole model": (
                sparse and (self.average == "noloco" or parts > 1)
            ),
            f"--average-share must be above 0 and at most 1, got {share}": not 0 < share <= 1,
            "--average-share is for --average parameters with --average-every": (
                share < 1 and (self.kind != "parameters" or together)
            ),
            "--average-fragments is for --average pseudo-gradients with --average-every": (
                parts > 1 and (self.kind != "pseudo_gradients" or together)
            ),
            f"--average-fragments {turns}": every and parts > self.average_every,
            "--average noloco is for --average-every: with --target-batch-size all step together": (
                self.average == "noloco" and together
            ),
        }

    def _needs(self) -> Iterator[tuple[str, bool, list[Flag]]]:
        """Flags that need another one: (the other one, True if it is given, the flags)."""
        every, together = bool(self.average_every), bool(self.target_batch_size)
        alone = ("average_share", "average_fragments", "average_by_samples", "average_dims")
        flags = {flag.key: flag for flag in flags_of(self)}
        of_both = ["average", "average_compression", *(each.key for each in flags_of(self.meeting))]
        either = [flags[key] for key in of_both if key not in alone]
        yield "--average-every or --target-batch-size", every or together, either
        yield "--average-every", every, [flags[key] for key in alone]
        yield "--average-compression top-k", self.is_sparse, [*flags_of(self.sparse)]
        yield "--average pseudo-gradients", self.kind == "pseudo_gradients", [*flags_of(self.outer)]

    @property
    def is_sparse(self) -> bool:
        """True if only the largest values travel."""
        return self.average_compression == "top-k"

    @property
    def kind(self) -> Literal["parameters", "gradients", "pseudo_gradients", "noloco"]:
        """Numbers that are averaged."""
        if self.average == "auto":
            return "gradients" if self.target_batch_size else "parameters"
        return "pseudo_gradients" if self.average == "pseudo-gradients" else self.average

    @property
    def listens(self) -> bool:
        """True if others call this process."""
        return bool(self.average_every or self.target_batch_size) and not self.meeting.client

    def _of_both(self) -> dict[str, Any]:
        """Settings of an averager and of a collaboration alike."""
        return {
            "timeout_s": self.meeting.timeout_s,
            "role": "client" if self.meeting.client else "auto",
            "speeds": self.meeting.speeds(),
            "compression": "none" if self.is_sparse else self.average_compression,
        }

    def config(self) -> "TreeAveragerConfig":
        """Settings of the averager. Raises ValueError if one is out of range."""
        from dmoe_jax.averaging import TreeAveragerConfig

        meeting = self.meeting
        return TreeAveragerConfig(
            side=meeting.side,
            dims=meeting.dims,
            window_s=meeting.window_s,
            share=self.average_share,
            **self._of_both(),
        )

    def collaboration(self) -> "CollaborationConfig":
        """Settings of this process's part in one large batch. Raises ValueError if one is out of range."""
        from dmoe_jax.collaboration import CollaborationConfig

        return CollaborationConfig(
            target_batch_size=self.target_batch_size, lead_s=self.meeting.window_s, **self._of_both()
        )

    def outer_optimizer(self) -> "optax.GradientTransformation | None":
        """The outer optimiser, which only pseudo-gradients have."""
        if self.kind != "pseudo_gradients":
            return None
        import optax

        rate, momentum = self.outer.learning_rate, self.outer.momentum
        if rate is None:
            rate = 1.0 if self.is_sparse else 0.4 if self.average_fragments > 1 else 0.7
        if momentum is None and not self.is_sparse:
            momentum = 0.9
        # An explicit 0 has a state, as checkpoints of earlier versions do; it is as large as the parameters.
        return optax.sgd(rate, momentum=momentum, nesterov=momentum is not None)

    def wrap(self, inner: "optax.GradientTransformation") -> "optax.GradientTransformation":
        """Have the trunk's optimiser average with others as these flags say; without averaging, return it as it is."""
        if not self.average_every:
            return inner
        from dmoe_jax.optim import moshpit_average, noloco, streaming_diloco

        if self.kind == "noloco":
            return noloco(inner, every=self.average_every)
        outer = self.outer_optimizer()
        if self.average_fragments > 1:
            return streaming_diloco(inner, every=self.average_every, fragments=self.average_fragments, outer=outer)
        return moshpit_average(
            inner,
            every=self.average_every,
            what=self.kind,
            outer=outer,
            weighted=self.average_by_samples,
            compress=self.sparse.feedback() if self.is_sparse else None,
        )
