"""Settings of this experiment's command line, and the loads that are measured."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from experiments.bench import Settings

Passes = Literal["forward", "training"]
"""Passes of a batch: all layers forward, or also all of them backward, in which they learn."""
PASSES: tuple[Passes, ...] = ("forward", "training")
Method = Literal["asynchronous", "model_parallel"]


class Block(NamedTuple):
    """One layer of the stack and the batch that each trainer sends through it.

    Attributes:
      kind: as `dmoe_jax.experts.make_expert` knows it.
      rows: of a trainer's batch, a power of two: vectors for feed-forward blocks, sequences for Transformer blocks.
      config: sizes, as `make_expert` takes them. A Transformer block remembers one position, the least that it can.
    """

    kind: str
    rows: int
    config: Mapping[str, int]


LAYERS = 16
BLOCKS = (
    Block("feedforward", 256, {"d_model": 256}),
    Block("transformer_xl", 4, {"d_model": 256, "num_heads": 4, "d_ff": 512, "seq_len": 64, "mem_len": 1}),
)
"""Layers of the stack, and the kinds of block that one consists of."""


class Delay(NamedTuple):
    """Delay with which a layer call is served.

    Attributes:
      mean_s: the mean, seconds.
      std_s: standard deviation of a log-normal delay; None: the delay is exponential.
    """

    mean_s: float
    std_s: float | None = None

    def draw_s(self, rng: random.Random) -> float:
        """One delay, seconds."""
        if not self.mean_s:
            return 0.0
        if self.std_s is None:
            return rng.expovariate(1 / self.mean_s)
        variance = math.log1p((self.std_s / self.mean_s) ** 2)
        return rng.lognormvariate(math.log(self.mean_s) - variance / 2, variance**0.5)


CLOUD = Delay(0.0925, 0.0324)
"""Round trips between the paper's three regions, mean and standard deviation in seconds."""
SERVERS, CLOUD_SERVERS = 4, 3
"""Expert nodes, each with a device of its own: beside the delays of the sweep, and in the three regions."""
JOINED = 2
"""Trainers' batches that a server may join into one."""
TRAINERS = 64
"""Asynchronous trainers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Trainers that send batches through a stack of equal layers, dealt out to the servers in turn."""

    method: Method = "asynchronous"
    """With one trainer: "model_parallel"."""
    passes: Passes = "forward"
    """Passes of a batch."""
    layers: int
    """Blocks of the stack."""
    servers: int
    """Expert nodes."""
    trainers: int
    """Batches in flight, one for each trainer."""
    delay: Delay = Delay(0.0)  # noqa: RUF009 (immutable)
    """Delay of each layer call, forward or backward."""
    calls: int
    """Layer calls that are timed, of all trainers together."""

    @property
    def calls_per_batch(self) -> int:
        """Layer calls, one after the other, that take a batch through the stack."""
        return self.layers * (1 if self.passes == "forward" else 2)

    @property
    def warm_up_calls(self) -> int:
        """Layer calls before the timed ones, in which the trainers spread over the servers; one trainer needs none."""
        return 0 if self.trainers == 1 else 4 * self.trainers

    def with_one_in_flight(self, calls: int) -> "Load":
        """The same with a single trainer, for whole batches of about so many calls."""
        whole = max(1, calls // self.calls_per_batch) * self.calls_per_batch
        return replace(self, method="model_parallel", trainers=1, calls=whole)


@dataclass(frozen=True, kw_only=True)
class LatencySettings(Settings):
    """Measure the throughput of asynchronous trainers and of naive model parallelism over the mean delay of a call."""

    quick: bool = False
    """Four delays and not ten, two seeds and not three, fewer calls; on real computing one seed and only feed-forward
    blocks, forward."""
    where: Literal["both", "virtual", "real"] = "both"
    """The whole grid in virtual time, a small one on real computing beside the same in virtual time, or both."""

    @property
    def seeds(self) -> range:
        """Seeds that are meant."""
        return range(self.seed, self.seed + (2 if self.quick else 3))

    def loads(self) -> list[list[Load]]:
        """The loads of one seed in virtual time with one kind of block: those of the curves; the three regions."""
        count, calls, alone = (4, 6, 128) if self.quick else (10, 12, 256)
        delays = [Delay(0.2 * number / (count - 1)) for number in range(count)]
        load = Load(layers=LAYERS, servers=SERVERS, trainers=TRAINERS, calls=calls * TRAINERS)
        cloud = replace(load, servers=CLOUD_SERVERS)
        return [_grid(load, delays, PASSES, alone=alone), _grid(cloud, [CLOUD], PASSES, alone=alone)]

    def agreement_loads(self) -> list[Load]:
        """The loads on real computing, and in virtual time, with one kind of block."""
        # With half as many calls, the few that are slow by chance made single rounds differ by up to 0.6.
        load = Load(layers=8, servers=2, trainers=8, calls=160)
        return _grid(load, [Delay(0.02), Delay(0.1)], PASSES[:1] if self.quick else PASSES, alone=32)


def _grid(load: Load, delays: Sequence[Delay], passes: Sequence[Passes], *, alone: int) -> list[Load]:
    """The load at each delay and with each passes, as it is, and with one batch in flight for about `alone` calls."""
    grid = [replace(load, delay=delay, passes=each) for delay in delays for each in passes]
    return [each for both in grid for each in (both, both.with_one_in_flight(alone))]
