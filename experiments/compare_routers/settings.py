"""The flags of the comparison and the constants that they stand for. Imports no JAX."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dmoe_jax.machine.cores import usable_cores
from experiments.transformer_xl.settings import Place, TrainingSettings

NAME = "compare_routers"

QUICK_ROUTERS = ("product_key", "balanced", "switch", "uniform_random")
"""One that learns and is additive, the same with a balancing bias, one with a balancing loss, and the bar: one that
knows nothing."""

WITH_LOSS = "product_key+balance"
"""Router that is compared beside the registered ones: product keys with a balancing loss, as `balanced` has a bias."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Under which circumstances all routers are compared."""

    name: str = ""
    """Name in tables and folders; empty for the settings as they are."""
    changes: Mapping[str, Any]
    """Settings of a run that are other than the command line's."""

    def label(self, router: str) -> str:
        """Return the name of a router under this condition in figures."""
        return f"{router}, {self.name}" if self.name else router


@dataclass(frozen=True, kw_only=True)
class CompareRoutersSettings(TrainingSettings):
    """Train the same mixture with one router after the other, on several seeds each, and put them side by side."""

    quick_steps: ClassVar[Mapping[Place, int]] = {"local": 20, "simulated": 32, "emulated": 32}
    quick_eval_tokens: ClassVar[int] = 4096
    may_differ: ClassVar[tuple[str, ...]] = ("routers", "seeds", "jobs", "keep_checkpoints")

    where: Literal["auto", "local", "simulated", "emulated"] = "auto"  # type: ignore[assignment]
    """local: at once on this device. simulated: slow trainers in virtual time, whose calls may fail. emulated: the same
    in one compiled program, without the network. auto: tiny is simulated, full is local."""
    routers: tuple[str, ...] = ()
    """Registered names, any of them with +balanced or +balance behind it, or your own: my_file.py:my_router. Default:
    all that are registered, with --route token without those that cannot, and product_key+balance; with --quick,
    four."""
    seeds: tuple[int, ...] = ()
    """Seeds; each router is trained once with each. Default: 0 1 2, or what --budget allows; with --quick, 0 1."""
    failures: tuple[float, ...] = ()
    """Further shares of failing calls beside --failure-rate: all routers are compared under each. Not --where local."""
    slow_nodes: tuple[float, ...] = ()
    """Factors by which the calls of one of the nodes take longer: all routers are compared under each. Only --where
    simulated, where there are nodes."""
    budget: str | None = None
    """Time for the comparison, such as 90s, 30m or 2h: a short piece of each router is timed, and seeds (three or
    more) and updates are chosen so that all fit. With --seeds or --steps only the other is chosen."""
    jobs: int | None = None
    """Runs trained at once, each in a process with its share of the cores. Default: two where simulated or emulated and
    there are two cores, else one."""
    keep_checkpoints: bool = False
    """Keep what finished runs have saved, for `dmoe inspect`. An emulated swarm has a gigabyte of it for each run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "jobs")
        for name in ("routers", "seeds", "failures", "slow_nodes"):
            chosen = getattr(self, name)
            if len(set(chosen)) < len(chosen):
                raise ValueError(f"--{name.replace('_', '-')} names one twice: {' '.join(map(str, chosen))}")
        if any(seed < 0 for seed in self.seeds):
            raise ValueError(f"--seeds must not be negative, got {' '.join(map(str, self.seeds))}")
        if not all(0 <= share < 1 for share in self.failures):
            raise ValueError(f"--failures must be from 0 to below 1, got {' '.join(map(str, self.failures))}")
        if self.failure_rate in self.failures:
            raise ValueError(f"--failures has {self.failure_rate}, which is --failure-rate already")
        if not all(1 < times < 1000 for times in self.slow_nodes):
            raise ValueError(f"--slow-nodes must be above 1 and below 1000, got {' '.join(map(str, self.slow_nodes))}")
        if self.failures and not self.is_asynchronous:
            raise ValueError(f"--failures needs --where simulated or emulated: no call fails where it is {self.place}")
        if self.slow_nodes and self.place != "simulated":
            raise ValueError(f"--slow-nodes needs --where simulated: there are no nodes where it is {self.place}")
        if self.budget is not None:
            _ = self.budget_s
            if self.seeds and self.steps:
                raise ValueError("--budget has nothing to choose beside --seeds and --steps: leave one of them out")

    @property
    def budget_s(self) -> float:
        """The budget in seconds; infinite without one.

        Raises:
          ValueError: it is no time.
        """
        if self.budget is None:
            return float("inf")
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", self.budget)
        if match is None or not float(match[1]) > 0:
            raise ValueError(f"--budget must be a time such as 90s, 30m or 2h, got {self.budget}")
        return float(match[1]) * _UNITS[match[2]]

    @property
    def chosen_seeds(self) -> tuple[int, ...]:
        """The seeds that are meant, without a budget."""
        return self.seeds or ((0, 1) if self.quick else (0, 1, 2))

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The circumstances under which all routers are compared, the settings as they are first."""
        return (
            Condition(changes={}),
            *(Condition(name=f"failures {share:g}", changes={"failure_rate": share}) for share in self.failures),
            *(Condition(name=f"slow node {times:g}x", changes={"slow_node": times}) for times in self.slow_nodes),
        )

    @property
    def num_jobs(self) -> int:
        """Number of runs that are trained at once."""
        default = min(2, usable_cores()) if self.is_asynchronous else 1
        return self.jobs or default
