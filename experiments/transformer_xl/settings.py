"""The flags of the experiment and the constants that they stand for. Imports no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from dmoe_jax.layer_config import Route
from dmoe_jax.machine.cores import usable_cores
from experiments.bench import ResumableSettings, Settings

NAME = "transformer_xl"

Model = Literal["dmoe", "small", "base"]
"""A mixture, the dense model of its experts' size, and the dense model of its FLOPs."""

Size = Literal["tiny", "full"]
"""Minutes on two cores, or the paper's."""

Place = Literal["local", "simulated", "emulated", "swarm"]
"""At once on this device; by a swarm of slow trainers, simulated with its network or emulated by one compiled program;
or by a swarm of processes."""

MAX_SEEDS = 1000
"""Most seeds that a run may have; seeds beyond them are the search's."""

_NOT_IN_A_SWARM = ("seeds", "search", "ingredients", "concurrency")

_ALL_MODELS: tuple[Model, ...] = ("dmoe", "small", "base")

QUICK_PAUSES = 4
"""Pauses of a quick run. Few: each ends the work of a swarm, and staleness begins anew after it."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(ResumableSettings):
    """The flags of every experiment that trains models of this one."""

    quick_steps: ClassVar[Mapping[Place, int]] = {
        "local": 30,
        "simulated": 160,
        "emulated": 160,
        "swarm": 160,
    }
    """Updates of each model in a quick run."""
    quick_eval_tokens: ClassVar[int] = 8192
    """Words of each evaluation of a quick run, the last ones too."""
    may_differ: ClassVar[tuple[str, ...]] = ()
    """Flags that a resumed run may change: each model compares the settings that matter to it."""

    size: Size = "tiny"
    """tiny: minutes on two cores for each model. full: the paper's size, for a large GPU."""
    where: Literal["auto", "local", "simulated"] = "auto"
    """local: at once on this device. simulated: slow trainers in virtual time, whose calls may fail. auto: tiny is
    simulated, full is local."""
    steps: int | None = None
    """Updates of each model. Default: the preset's."""
    batch_size: int | None = None
    """Sequences of an update. Default: the preset's on one device, 1 for each simulated trainer."""
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
    """Trainers, where simulated."""
    delay_s: float = 1.0
    """Mean of the exponential delay where simulated, virtual seconds."""
    failure_rate: float = 0.1
    """Share of the expert calls in a simulated swarm that are never answered."""
    staleness_power: float = 0.5
    """An update of trunk or experts is divided by (1 + its staleness) to this power, and stale ones get no
    momentum; 0: plain Adam."""
    slow_node: float = 1.0
    """Factor by which the calls of the first of the nodes take longer. Only dmoe, and only where simulated."""
    concurrency: int | None = None
    """Simulated trainers at work at once; the others wait for their turn. Default: all. With 1 nothing is stale."""
    step_size: float = 1.0
    """Times the preset's step sizes, of trunk and experts."""
    data: str = "auto"
    """Corpus: auto (DMOE_DATA, cache, download, else the embedded one), wikitext-2, embedded, or a text of your own: a
    file, or a folder with train.txt, valid.txt and test.txt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "steps", "batch_size", "eval_every", "trainers", "concurrency", "slow_node", "k_best")
        if any(extent < 1 for extent in self.grid_size):
            raise ValueError(f"--grid-size must be extents of at least 1, got {' '.join(map(str, self.grid_size))}")
        self.require_above(0, "step_size")
        self.require_at_least(0, "eval_tokens", "final_eval_tokens", "delay_s", "staleness_power")
        if not 0 <= self.failure_rate < 1:
            raise ValueError(f"--failure-rate must be from 0 to below 1, got {self.failure_rate}")
        if self.slow_node != 1 and self.place != "simulated":
            raise ValueError(f"--slow-node needs --where simulated, where there are nodes; got {self.place}")

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

    @property
    def compute_dtype(self) -> str:
        """Dtype of the layers' matrix products."""
        return "bfloat16" if self.bf16 else "float32"


@dataclass(frozen=True, kw_only=True)
class TransformerXLSettings(TrainingSettings, Settings):
    """Train Transformer-XL language models on WikiText-2: a mixture of small layers, the small model, the large one."""

    may_differ: ClassVar = (
        *("model", "seeds", "ingredients", "jobs", "no_overhead"),
        *("nodes", "processes", "average_every", "join"),
    )

    model: tuple[Model, ...] = ()
    """Models to train: dmoe, small, base. Default: all three (in a swarm of processes: dmoe)."""
    seeds: int | None = None
    """Seeds of each model: --seed and those that follow it. Default: 3 for several models over a whole simulated run,
    else 1 (--quick, --steps, one model, or on this device)."""
    search: bool = False
    """First train each model with half, once and twice the preset's step sizes, and with further ones while the best of
    any is at the edge, on a seed that is not reported; go on with the best by validation perplexity."""
    search_steps: int | None = None
    """Updates of each run of the search. Default: as many as are reported of."""
    ingredients: bool = False
    """Also train dmoe without staleness, without failures, and without both, on the same text at the same number of
    updates. Simulated only."""
    router: str = "product_key"
    """Router of dmoe: a registered name, or my_file.py:my_router."""
    where: Literal["auto", "local", "simulated", "emulated", "swarm"] = "auto"  # type: ignore[assignment]
    """local: at once on this device. simulated: 32 slow trainers in virtual time. emulated: the same with dmoe's
    trainers and experts in one compiled program, without the network. swarm: real processes on this machine, or the
    swarm given by --join; dmoe only. auto: tiny is simulated, full is local."""
    steps: int | None = None
    """Updates of each model, in a swarm of processes of each trainer process. Default: the preset's."""
    batch_size: int | None = None
    """Sequences of an update. Default: the preset's on one device, 1 for each simulated trainer, for each of the four
    trainers of a swarm of processes a quarter of the preset's."""
    nodes: int = 4
    """Expert nodes of a swarm of processes."""
    processes: int = 2
    """Trainer processes of a swarm of processes, each with its own trunk; they are averaged."""
    average_every: int = 10
    """Trunk updates of a trainer process between two averages."""
    join: tuple[str, ...] = ()
    """Peers of a running swarm, instead of starting one."""
    jobs: int | None = None
    """Runs trained at once, each in a process with its share of the cores. Default: two where simulated and there are
    two cores, else one."""
    no_overhead: bool = False
    """Leave out the measurement of what the mixture costs over a dense layer of its FLOPs (where dmoe is local and
    routes sequences)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "nodes", "processes", "average_every", "jobs", "seeds", "search_steps")
        if len(set(self.model)) < len(self.model):
            raise ValueError(f"--model names a model twice: {' '.join(self.model)}")
        if self.where == "swarm" and self.model not in ((), ("dmoe",)):
            raise ValueError(f"--where swarm trains dmoe only, got --model {' '.join(self.model)}")
        if self.where == "swarm":
            asked = [name for name in _NOT_IN_A_SWARM if getattr(self, name) not in (None, False)]
            if asked or self.step_size != 1:
                name = (*asked, "step_size")[0]
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is not for --where swarm, got {getattr(self, name)}")
        if self.slow_node != 1 and self.models != ("dmoe",):
            raise ValueError(f"--slow-node is for --model dmoe alone, got {' '.join(self.models)}")
        if self.search_steps and not self.search:
            raise ValueError(f"--search-steps needs --search, got {self.search_steps}")
        if self.ingredients and not (self.is_asynchronous and "dmoe" in self.models):
            got = f"{' '.join(self.models)}, {self.place}"
            raise ValueError(f"--ingredients needs dmoe, simulated or emulated, got {got}")
        if self.num_seeds > MAX_SEEDS:
            raise ValueError(f"--seeds must be at most {MAX_SEEDS}, got {self.num_seeds}")

    @property
    def models(self) -> tuple[Model, ...]:
        """The models to train, in order."""
        return self.model or (("dmoe",) if self.where == "swarm" else _ALL_MODELS)

    @property
    def num_seeds(self) -> int:
        """Number of seeds that each model is trained with."""
        is_whole = self.is_asynchronous and not self.quick and self.steps is None
        return self.seeds or (3 if is_whole and len(self.models) > 1 else 1)

    @property
    def num_jobs(self) -> int:
        """Number of runs that are trained at once."""
        default = min(2, usable_cores()) if self.is_asynchronous else 1
        return self.jobs or default

    def flags(self, *without: str) -> list[str]:
        """The command line that gives these settings, without the fields named."""
        changed = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}
        return as_flags({name: value for name, value in changed.items() if name not in without})


def as_flags(values: Mapping[str, object]) -> list[str]:
    """`{"grid_size": (4, 4), "resume": False}` as `--grid-size 4 4`; nothing for False, None and ()."""
    flags: list[str] = []
    for name, value in values.items():
        if value in (None, ()) or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags += map(str, value if isinstance(value, tuple) else (value,))
    return flags
