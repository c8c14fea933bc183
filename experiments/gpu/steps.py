"""What waits for a GPU, in an order of worth."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One measurement, in a folder of its own; in one command or in several."""

    name: str
    """Of the step and of its folder."""
    experiment: str
    """What runs: `python -m experiments.EXPERIMENT`."""
    flags: tuple[str, ...] = ()
    """Its flags."""
    purpose: str
    """What it is for, in a phrase."""
    about: str
    """How long it takes in all, where that is known or can be guessed."""
    stops: bool = False
    """Whether it knows `--stop-after`: it then ends at a pause before the limit, with a checkpoint."""
    timed_by: str = ""
    """A step that must be finished before: it times the updates of this training, and so says how often it pauses."""


_FULL = ("--size", "full", "--bf16")


def _full_transformer_xl(model: str, purpose: str) -> Iterator[Step]:
    """Time a full-size model, then train it."""
    flags = (*_FULL, "--where", "local", "--model", model)
    yield Step(
        name=f"time_{model}",
        experiment="transformer_xl",
        flags=(*flags, "--timing", "200"),
        purpose=f"updates per second of the full {model}, and into how many commands its training falls",
        about="about 3 min",
        stops=True,
    )
    yield Step(
        name=f"train_{model}",
        experiment="transformer_xl",
        flags=(*flags, "--no-overhead"),  # a step of its own
        purpose=purpose,
        about=f"hours; time_{model} says how many",
        stops=True,
        timed_by=f"time_{model}",
    )


def _paper_throughput(seed: int) -> Step:
    flags = ("--size", "paper", "--where", "virtual", "--repeats", "1", "--seed", str(seed))
    return Step(
        name=f"throughput_seed{seed}",
        experiment="throughput_vs_latency",
        flags=flags,
        purpose=f"figure 4 with the paper's blocks, timed on this device; seed {seed}",
        about="about 5 min",
    )


STEPS: tuple[Step, ...] = (
    *_full_transformer_xl("base", "the published recipe to its 63.4 test perplexity (at most 66 agrees)"),
    Step(
        name="node_strategies",
        experiment="node_speed",
        flags=("--parts", "strategies", "--rounds", "3", "--slice-s", "0.5"),
        purpose="experts by programs of their own, and stacked: 16 to 256 of them, batches of 1 to 256 rows",
        about="about 4 min",
    ),
    Step(
        name="node_calls",
        experiment="node_speed",
        flags=("--parts", "calls", "--rounds", "3", "--slice-s", "1"),
        purpose="a node beside bare calls; how long it compiles before it serves is in its metrics",
        about="not known: more than 2 min a case",
    ),
    Step(
        name="demonstration",
        experiment="node_speed",
        flags=("--parts", "demonstration", "--demo-rounds", "1"),
        purpose="steps a second of the demonstration beside one jitted program",
        about="not known: its programs take more than 2 min to compile",
    ),
    Step(
        name="overhead_full",
        experiment="moe_overhead",
        flags=_FULL,
        purpose="what the full mixture costs beside a dense layer of its FLOPs",
        about="about 5 min",
    ),
    Step(
        name="overhead_tiny",
        experiment="moe_overhead",
        purpose="the same in the tiny size, beside the figure of the CPU",
        about="about 2 min",
    ),
    Step(
        name="emulation",
        experiment="emulation",
        purpose="whether the emulator equals the swarm on a GPU too, and its speed there",
        about="about 5 min",
    ),
    # 4096 experts of the paper's width are 26 thousand million parameters, with Adam's moments 310 GB: no one GPU.
    Step(
        name="mnist",
        experiment="mnist_convergence",
        flags=("--size", "paper", "--experts", "256", "64", "--gate", "both", "--seeds", "1", "--jobs", "1"),
        purpose="figure 5 at the paper's width, one curve after the other; more --seeds with --resume in its folder",
        about="not known",
    ),
    *(_paper_throughput(seed) for seed in range(3)),
    Step(
        name="throughput_real",
        experiment="throughput_vs_latency",
        flags=("--where", "real"),
        purpose="whether virtual time agrees with nodes that compute on a GPU",
        about="about 5 min",
    ),
    *_full_transformer_xl("small", "what the full mixture must beat"),
    *_full_transformer_xl("dmoe", "the full mixture without asynchrony"),
    Step(
        name="emulated_dmoe",
        experiment="transformer_xl",
        flags=(*_FULL, "--where", "emulated", "--model", "dmoe", "small", "--eval-every", "250", "--jobs", "1"),
        purpose="figure 6 in the full size: 32 trainers, 1000 ms, 10 % failures, in the emulator",
        about="hours",
        stops=True,
    ),
    Step(
        name="layer_cost",
        experiment="layer_cost",
        purpose="what a remote layer costs inside jit when the device is a GPU",
        about="about 2 min",
    ),
)
