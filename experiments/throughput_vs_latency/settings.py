"""Settings of this experiment's command line, and the loads that are measured at each size."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from experiments.bench import Settings

BlockName = Literal["feedforward", "transformer"]
BLOCK_NAMES: tuple[BlockName, ...] = ("feedforward", "transformer")
Passes = Literal["forward", "training"]
"""Passes of a batch: all layers forward, or also all of them backward, in which they learn."""
PASSES: tuple[Passes, ...] = ("forward", "training")
Method = Literal["asynchronous", "model_parallel"]
METHODS: tuple[Method, ...] = ("asynchronous", "model_parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer of the stack and the batch that each trainer sends through it."""

    name: BlockName
    """Kind of network."""
    batch_rows: int
    """Rows of a trainer's batch, a power of two: vectors for feed-forward blocks, sequences for Transformer blocks."""
    d_model: int
    """Width of a vector."""
    num_heads: int = 1
    """Attention heads; like the next two only of a Transformer block."""
    d_ff: int = 1
    """Width of its feed-forward part."""
    seq_len: int = 1
    """Positions of a sequence."""


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
        variance = float(np.log1p((self.std_s / self.mean_s) ** 2))
        return rng.lognormvariate(float(np.log(self.mean_s)) - variance / 2, variance**0.5)


CLOUD = Delay(0.0925, 0.0324)
"""Round trips between the paper's three regions, mean and standard deviation in seconds."""
CLOUD_SERVERS = 3


class Place(NamedTuple):
    """A stack of equal layers on some servers.

    Attributes:
      layers: how many; they are dealt out to the servers in turn.
      servers: expert nodes.
      shared_device: whether all servers share one device, as on one machine, instead of having one each.
      round_trip_s: what a call and its answer take in virtual time beside the delay and the device, seconds.
    """

    layers: int
    servers: int
    shared_device: bool = False
    round_trip_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Trainers that send batches through a stack."""

    place: Place
    """The stack."""
    trainers: int
    """Batches in flight, one for each trainer."""
    delay: Delay
    """Delay of each layer call, forward or backward."""
    passes: Passes
    """Passes of a batch."""
    joined: int
    """Trainers' batches that a server may join into one, a power of two."""
    calls: int
    """Layer calls that are timed, of all trainers together."""

    @property
    def calls_per_batch(self) -> int:
        """Layer calls, one after the other, that take a batch through the stack."""
        return self.place.layers * (1 if self.passes == "forward" else 2)

    @property
    def warm_up_calls(self) -> int:
        """Layer calls before the timed ones, in which the trainers spread over the servers; one trainer needs none."""
        return 0 if self.trainers == 1 else 4 * self.trainers


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Stack and blocks that are measured at one of the sizes."""

    layers: int
    """Blocks of the stack."""
    blocks: Mapping[BlockName, Block]
    """Block of each kind."""


SIZES = {
    "laptop": Size(
        layers=16,
        blocks={
            "feedforward": Block(name="feedforward", batch_rows=256, d_model=256),
            "transformer": Block(name="transformer", batch_rows=4, d_model=256, num_heads=4, d_ff=512, seq_len=64),
        },
    ),
    # The paper's: 224 blocks on four GPUs, encoder layers with PyTorch's feed-forward width of 2048.
    "paper": Size(
        layers=224,
        blocks={
            "feedforward": Block(name="feedforward", batch_rows=2048, d_model=1024),
            "transformer": Block(name="transformer", batch_rows=4, d_model=1024, num_heads=16, d_ff=2048, seq_len=512),
        },
    ),
}

AGREEMENT_DELAYS_S = (0.02, 0.1)


@dataclass(frozen=True, kw_only=True)
class LatencySettings(Settings):
    """Measure the throughput of asynchronous trainers and of naive model parallelism over the mean delay of a call."""

    quick: bool = False
    """Four delays, two repeats and fewer calls; on real computing only feed-forward blocks, forward."""
    size: Literal["laptop", "paper"] = "laptop"
    """Size of the blocks and the stack. The paper's blocks want a GPU to measure their cost on."""
    where: Literal["both", "virtual", "real"] = "both"
    """The whole grid in virtual time, a small one on real computing beside the same in virtual time, or both."""
    layers: int | None = None
    """Blocks of the stack in virtual time. Default: 16, of the paper's size 224."""
    servers: int = 4
    """Expert nodes, each with a device of its own; in the three regions there are three."""
    trainers: int = 64
    """Asynchronous trainers."""
    joined: int = 2
    """Trainers' batches that a server may join into one: a power of two, to which it would pad other numbers."""
    delays: int = 10
    """Mean delays, evenly from 0 to --max-delay-s."""
    max_delay_s: float = 0.2
    """Longest mean delay, seconds."""
    repeats: int = 3
    """Seeds, beginning with --seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "layers", "servers", "trainers", "repeats")
        self.require_at_least(2, "delays")
        if self.joined < 1 or self.joined & (self.joined - 1):
            raise ValueError(f"--joined must be a power of two such as 1, 2 or 4, got {self.joined}")
        self.require_above(0, "max_delay_s")
        if self.servers > self.chosen_layers:
            raise ValueError(f"--servers must be at most the {self.chosen_layers} layers, got {self.servers}")

    @property
    def chosen_layers(self) -> int:
        """Blocks of the stack."""
        return self.layers or SIZES[self.size].layers

    @property
    def chosen_repeats(self) -> int:
        """Seeds that are meant."""
        return min(self.repeats, 2) if self.quick else self.repeats

    @property
    def agreement_rounds(self) -> int:
        """Number of measurements of the small grid: other work on the machine spoils one round, seldom two of three."""
        return 1 if self.quick else 3

    @property
    def delays_s(self) -> list[float]:
        """Mean delays of the curves, seconds, 0 first."""
        count = min(self.delays, 4) if self.quick else self.delays
        return [float(delay) for delay in np.linspace(0, self.max_delay_s, count)]

    def grid(self) -> list[tuple[Method, Load]]:
        """Return the loads of one repeat in virtual time with one kind of block: the curves, then the three regions."""
        calls = 6 if self.quick else 12
        loads = []
        stacks = [(self.servers, Delay(delay_s)) for delay_s in self.delays_s]
        if self.chosen_layers >= CLOUD_SERVERS:
            stacks.append((CLOUD_SERVERS, CLOUD))
        for servers, delay in stacks:
            for passes in PASSES:
                load = Load(
                    place=Place(self.chosen_layers, servers),
                    trainers=self.trainers,
                    delay=delay,
                    passes=passes,
                    joined=self.joined,
                    calls=calls * self.trainers,
                )
                loads += _both_methods(load, alone=128 if self.quick else 256)
        return loads

    def agreement_grid(self) -> list[tuple[Method, Load]]:
        """Return the loads on real computing and in virtual time with one kind of block: two servers on one device."""
        # With half as many, the few that are slow by chance made single rounds differ by up to 0.6.
        calls = 160
        loads = []
        for delay_s in AGREEMENT_DELAYS_S:
            for passes in PASSES[:1] if self.quick else PASSES:
                load = Load(
                    place=Place(layers=8, servers=2, shared_device=True),
                    trainers=8,
                    delay=Delay(delay_s),
                    passes=passes,
                    joined=self.joined,
                    calls=calls,
                )
                loads += _both_methods(load, alone=calls // 5)
        return loads


def _both_methods(load: Load, *, alone: int) -> list[tuple[Method, Load]]:
    """The load as it is, and with one batch in flight, whole batches of about `alone` calls."""
    batches = max(1, alone // load.calls_per_batch)
    single = replace(load, trainers=1, calls=batches * load.calls_per_batch)
    return [("asynchronous", load), ("model_parallel", single)]
