"""Studies that run, and the bars that their figures have to meet."""

import functools
import time
from collections.abc import Awaitable, Callable

from dmoe_net.transport.sim import run as in_virtual_time
from experiments.bench import Experiment, Run
from experiments.dht_scale import studies
from experiments.dht_scale.settings import DhtScaleSettings, Part
from experiments.results import Bar, Result

Study = Callable[..., Awaitable[studies.Figures]]

# Name of a study's figures -> the study. Those of the quick run are small enough for ten minutes on one core.
QUICK: dict[Part, dict[str, Study]] = {
    "cold": {
        "full_100": functools.partial(studies.cold, "full", 100, trials=40),
        "light_1000": functools.partial(studies.cold, "light", 1000, trials=40),
    },
    "trainer": {"trainer_4096": functools.partial(studies.trainer, 300, 4096, 16, seconds=60)},
    "announcing": {"announcing": functools.partial(studies.announcing, 300, seconds=60.0)},
    "churn": {"churn": functools.partial(studies.churn, 100, 1024, minutes=6.0, session_s=600.0)},
    "vanish": {"vanish": functools.partial(studies.vanish, 300, gets=200)},
    "unreachable": {"unreachable": functools.partial(studies.unreachable, nodes=40, hidden=12, gets=200)},
    "clocks": {"clocks": functools.partial(studies.clocks, 60)},
    "partition": {"partition": functools.partial(studies.partition, 100, minutes=5.0)},
    "bootstraps": {"bootstraps": functools.partial(studies.bootstraps, 60)},
    "joins": {"joins": functools.partial(studies.joins, 500, selections=50)},
    "memory": {"memory": functools.partial(studies.memory, 60)},
}
FULL: dict[Part, dict[str, Study]] = {
    "cold": {
        "full_100": functools.partial(studies.cold, "full", 100, trials=100),
        "full_1000": functools.partial(studies.cold, "full", 1000, trials=100),
        "light_1000": functools.partial(studies.cold, "light", 1000, trials=100),
        "light_10000": functools.partial(studies.cold, "light", 10_000, trials=100),
    },
    "trainer": {
        "trainer_4096": functools.partial(studies.trainer, 300, 4096, 16, seconds=300),
        "trainer_100000": functools.partial(studies.trainer, 300, 100_000, 10, seconds=60),
    },
    "announcing": {"announcing": functools.partial(studies.announcing, 10_000, seconds=60.0)},
    "churn": {
        f"churn_{number}": functools.partial(studies.churn, 100, 1024, minutes=20.0, session_s=600.0)
        for number in range(3)
    },
    "vanish": {"vanish": functools.partial(studies.vanish, 1000, gets=500)},
    "unreachable": {"unreachable": functools.partial(studies.unreachable, nodes=40, hidden=12, gets=500)},
    "clocks": {"clocks": functools.partial(studies.clocks, 150)},
    "partition": {"partition": functools.partial(studies.partition, 300, minutes=10.0)},
    "bootstraps": {"bootstraps": functools.partial(studies.bootstraps, 200)},
    "joins": {"joins": functools.partial(studies.joins, 10_000, selections=1000)},
    "memory": {"memory": functools.partial(studies.memory, 300)},
}

BARS = (
    Bar(name="full_100_mean_s", bound=0.317),
    Bar(name="full_1000_mean_s", bound=0.528),
    Bar(name="light_10000_mean_s", bound=0.764),
    Bar(name="trainer_4096_prefetch_s", bound=1.0),
    Bar(name="trainer_4096_calls_per_s", bound=10.0),
    Bar(name="trainer_4096_down_bytes_per_s", bound=30_000.0),
    Bar(name="trainer_4096_steps_that_wait", bound=0.0),
    Bar(name="trainer_100000_prefetch_s", bound=2.0),
    Bar(name="trainer_100000_calls_per_s", bound=30.0),
    Bar(name="announcing_one_calls_per_s", bound=2.0),
    Bar(name="announcing_sixteen_calls_per_s", bound=15.0),
    Bar(name="churn_recall_worst", bound=0.999, comparison=">="),
    Bar(name="churn_dead_listed", bound=0.02),
    Bar(name="vanish_minute_ratio", bound=1.5),
    Bar(name="vanish_succeeded", bound=1.0, comparison=">="),
    Bar(name="unreachable_entries", bound=0),
    Bar(name="clocks_found", bound=1.0, comparison=">="),
    Bar(name="clocks_gone_s", bound=60.0),
    Bar(name="partition_healed_s", bound=60.0),
    Bar(name="bootstraps_one_swarm_s", bound=300.0),
    Bar(name="memory_refreshed_kb", bound=400.0),
)
"""Bars that the design promises to meet. A study that did not run has none."""


def measure(run: Run[DhtScaleSettings]) -> None:
    """Run each study in a virtual time of its own."""
    settings = run.settings
    for part in settings.parts:
        for number, (name, study) in enumerate((QUICK if settings.quick else FULL)[part].items()):
            run.say(name.replace("_", " "))
            began = time.perf_counter()
            seed = settings.seed + (number if part == "churn" else 0)
            figures = in_virtual_time(functools.partial(study, seed=seed), seed=seed)
            run.log("study", name=name, wall_s=time.perf_counter() - began, **figures)


def summarise(run: Run[DhtScaleSettings]) -> Result | None:
    """Put the figures of all studies together, each under its study's name."""
    records = run.records("study")
    if not records:
        return None
    figures: dict[str, object] = {}
    for record in records:
        name = record["name"]
        figures |= {f"{name}_{key}": value for key, value in record.items() if key not in ("kind", "name", "time")}
    if churns := [record for record in records if record["name"].startswith("churn_")]:
        figures["churn_recall_worst"] = min(record["recall_worst"] for record in churns)
        figures["churn_dead_listed"] = max(record["dead_listed"] for record in churns)
    bars = tuple(bar for bar in BARS if bar.name in figures)
    return Result(title="Experts found in large swarms", figures=figures, bars=bars)


EXPERIMENT = Experiment(measure=measure, summarise=summarise)
