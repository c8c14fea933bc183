"""The flags of the experiment and the constants that they stand for. Imports no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from dmoe_jax.layer_config import Route
from experiments.bench import Settings, SweepSettings

Model = Literal["dmoe", "small", "base"]
"""A mixture, the dense model of its experts' size, and the dense model of its FLOPs."""

Size = Literal["tiny", "full"]
"""Minutes on two cores, or the paper's."""

Place = Literal["local", "simulated", "emulated", "swarm"]
"""At once on this device; by a swarm of slow trainers, simulated with its network or emulated by one compiled program;
or by a swarm of processes."""

MAX_SEEDS = 1000
"""Most seeds that a run may have; seeds beyond them are the search's."""

QUICK_PAUSES = 4
"""Pauses of a quick run. Few: each ends the work of a swarm, and staleness begins anew after it."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(SweepSettings):
    """The flags of every experiment that trains models of this one."""

    quick_steps: ClassVar[Mapping[Place, int]] = {"local": 30, "simulated": 160, "emulated": 160, "swarm": 160}
    """Updates of each model in a quick run."""
    quick_eval_tokens: ClassVar[int] = 8192
    """Words of each evaluation of a quick run, the last ones too."""
    may_differ: ClassVar[tuple[str, ...]] = ()  # each model compares the settings that matter to it

    size: Size = "tiny"
    """tiny: minutes on two cores for each model. full: the paper's size, for a large GPU."""
    where: Literal["auto", "local", "simulated", "emulated", "swarm"] = "auto"
    """local: at once on this device. simulated: slow trainers in virtual time, whose calls may fail. emulated: the same
    with dmoe's trainers and experts in one compiled program, without the network. swarm: real processes on this
    machine; dmoe only. auto: tiny is simulated, full is local."""
    steps: int | None = None
    """Updates of each model, in a swarm of each of its two trainer processes. Default: the preset's."""
    batch_size: int | None = None
    """Sequences of an update. Default: the preset's on one device, 1 for each slow trainer, a quarter of the preset's
    for each of the four trainers of a swarm."""
    route: Route = "sequence"
    """Unit that has experts of its own in dmoe: a sequence, whose experts are whole layers; or each token, whose
    experts are the feed-forward networks of layers that share one attention."""
    grid_size: tuple[int, ...] = ()
    """Experts of each layer of dmoe, as the extents of their grid: 8 8 are 64. Default: the preset's."""
    k_best: int | None = None
    """Experts that each sequence, or token, goes to in dmoe. Default: the preset's."""
    bf16: bool = False
    """Multiply matrices of the layers in bfloat16."""
    eval_every: int | None = None
    """Updates between two pauses for evaluation and checkpoint. Default: the preset's."""
    eval_tokens: int = 16_384
    """Validation words of an evaluation in a pause, 0 for all; the same words at every point of a curve, the last one
    too. After the end all are read, and all of the test text, for the final figures."""
    final_eval_tokens: int = 0
    """Words of both texts that are read after the end, 0 for all."""
    trainers: int = 32
    """Slow trainers, where simulated or emulated."""
    delay_s: float = 1.0
    """Mean of the exponential delay of each expert call, and of each step of a dense model; virtual seconds."""
    failure_rate: float = 0.1
    """Share of the expert calls of slow trainers that are never answered."""
    staleness_power: float = 0.5
    """An update of trunk or experts is divided by (1 + its staleness) to this power, and stale ones get no
    momentum; 0: plain asynchronous Adam, with the step sizes of one trainer."""
    slow_node: float = 1.0
    """Factor by which the calls of the first of the nodes take longer. Only dmoe, and only where simulated."""
    concurrency: int | None = None
    """Slow trainers of dmoe at work at once, where emulated; the others wait for their turn. Default: all. With 1
    nothing is stale."""
    step_size: float = 1.0
    """Times the preset's step sizes, of trunk and experts."""
    data: str = "auto"
    """Corpus: auto (DMOE_DATA, cache, download, else the embedded one), wikitext-2, embedded, or a text of your own: a
    file, or a folder with train.txt, valid.txt and test.txt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "steps", "batch_size", "eval_every", "trainers", "concurrency", "slow_node", "k_best")
        self.require_above(0, "step_size")
        self.require_at_least(0, "eval_tokens", "final_eval_tokens", "delay_s", "staleness_power")
        if not 0 <= self.failure_rate < 1:
            raise ValueError(f"--failure-rate must be from 0 to below 1, got {self.failure_rate}")
        if self.slow_node != 1 and self.place != "simulated":
            raise ValueError(f"--slow-node needs --where simulated, where there are nodes; got {self.place}")
        if self.concurrency and self.place != "emulated":
            raise ValueError(f"--concurrency needs --where emulated, got {self.place}")
        if self.route == "token" and self.place == "emulated":
            raise ValueError("--route token is not for --where emulated; simulated has the same setting")

    @property
    def place(self) -> Place:
        """Place where the models train."""
        if self.where == "auto":
            return "simulated" if self.size == "tiny" else "local"
        return self.where

    @property
    def is_asynchronous(self) -> bool:
        """True if slow trainers of one sequence each train the models on this machine."""
        return self.place in ("simulated", "emulated")


@dataclass(frozen=True, kw_only=True)
class TransformerXLSettings(TrainingSettings, Settings):
    """Train Transformer-XL language models on WikiText-2: a mixture of small layers, the small model, the large one."""

    may_differ: ClassVar = ("model", "seeds", "ingredients", "on", "jobs")

    model: tuple[Model, ...] = ()
    """Models to train: dmoe, small, base. Default: all three, in a swarm dmoe."""
    seeds: int | None = None
    """Seeds of each model: --seed and those that follow it. Default: 3 for several models over a whole run of slow
    trainers, else one."""
    search: bool = False
    """First train each model with 1/32, 1/16, ... 4 times the preset's step sizes for 2,000 updates or --steps, on a
    seed that is not reported, and go on with the best of each by validation perplexity."""
    ingredients: bool = False
    """Also train dmoe without staleness, without failures, and without both, on the same text at the same number of
    updates. Only where emulated."""
    router: str = "product_key"
    """Router of dmoe: a registered name, or my_file.py:my_router."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "seeds")
        got = " ".join(self.models)
        if len(set(self.model)) < len(self.model):
            raise ValueError(f"--model names a model twice: {got}")
        of_dmoe = {"--where swarm": self.place == "swarm", "--slow-node": self.slow_node != 1}
        for flag, is_given in (of_dmoe | {"--concurrency": self.concurrency is not None}).items():
            if is_given and self.models != ("dmoe",):
                raise ValueError(f"{flag} is for --model dmoe alone, got {got}")
        if self.ingredients and (self.place != "emulated" or "dmoe" not in self.models):
            raise ValueError(f"--ingredients needs dmoe and --where emulated, got {got}, {self.place}")
        if self.num_seeds > MAX_SEEDS:
            raise ValueError(f"--seeds must be at most {MAX_SEEDS}, got {self.num_seeds}")

    @property
    def models(self) -> tuple[Model, ...]:
        """The models to train, in order."""
        return self.model or (("dmoe",) if self.place == "swarm" else ("dmoe", "small", "base"))

    @property
    def num_seeds(self) -> int:
        """Number of seeds that each model is trained with."""
        is_whole = self.is_asynchronous and not self.quick and self.steps is None
        return self.seeds or (3 if is_whole and len(self.models) > 1 else 1)
