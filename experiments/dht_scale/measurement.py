"""Studies that run, and the bars that their figures have to meet."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from dmoe_net import run as in_virtual_time
from experiments.bench import Experiment, Run
from experiments.dht_scale import studies
from experiments.dht_scale.settings import DhtScaleSettings, Part
from experiments.dht_scale.world import Kind, open_world
from experiments.results import Bar, Result

Sizes = tuple[float, ...]


class Study(NamedTuple):
    """A study under the name of its figures, and its sizes in a quick and in a full run; None: it is not in that."""

    part: Part
    name: str
    kind: Kind
    main: Callable[..., Awaitable[studies.Figures]]
    quick: Sizes | None
    full: Sizes | None
    seed: int = 0  # beyond that of the settings


# Those of the quick run are small enough for ten minutes on one core.
STUDIES = (
    Study("cold", "full_100", "full", studies.cold, (100, 40), (100, 100)),
    Study("cold", "full_1000", "full", studies.cold, None, (1000, 100)),
    Study("cold", "light_1000", "light", studies.cold, (1000, 40), (1000, 100)),
    Study("cold", "light_10000", "light", studies.cold, None, (10_000, 100)),
    Study("trainer", "trainer_4096", "light", studies.trainer, (300, 4096, 16, 60), (300, 4096, 16, 300)),
    Study("trainer", "trainer_100000", "light", studies.trainer, None, (300, 100_000, 10, 60)),
    Study("announcing", "announcing", "light", studies.announcing, (300,), (10_000,)),
    Study("churn", "churn", "light", studies.churn, (100, 1024, 6.0), None),
    *(Study("churn", f"churn_{n}", "light", studies.churn, None, (100, 1024, 20.0), seed=n) for n in range(3)),
    Study("vanish", "vanish", "light", studies.vanish, (300, 200), (1000, 500)),
    Study("clocks", "clocks", "light", studies.clocks, (60,), (150,)),
    Study("partition", "partition", "light", studies.partition, (100, 5.0), (300, 10.0)),
    Study("bootstraps", "bootstraps", "light", studies.bootstraps, (60,), (200,)),
    Study("joins", "joins", "light", studies.joins, (500, 50), (10_000, 1000)),
    Study("memory", "memory", "full", studies.memory, (300,), (300,)),
)

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
    Bar(name="clocks_found", bound=1.0, comparison=">="),
    Bar(name="clocks_gone_s", bound=60.0),
    Bar(name="partition_healed_s", bound=60.0),
    Bar(name="bootstraps_one_swarm_s", bound=300.0),
    Bar(name="joins_cpu_s", bound=600.0),
    Bar(name="joins_peak_rss_mb", bound=1500.0),
    Bar(name="memory_refreshed_kb", bound=400.0),
)
"""Bars that the design promises to meet. A study that did not run has none."""


async def figures_of(study: Study, sizes: Sizes, seed: int) -> studies.Figures:
    """Run a study in a world of its own."""
    async with open_world(study.kind, seed=seed) as world:
        return {"network": study.kind, "nodes": sizes[0], **await study.main(world, *sizes)}


def measure(run: Run[DhtScaleSettings]) -> None:
    """Run each study in a virtual time of its own."""
    for part in run.settings.parts:
        for study in STUDIES:
            sizes = study.quick if run.settings.quick else study.full
            if study.part == part and sizes is not None:
                run.say(study.name.replace("_", " "))
                began, seed = time.perf_counter(), run.settings.seed + study.seed
                figures = in_virtual_time(figures_of, study, sizes, seed, seed=seed)
                run.log("study", name=study.name, wall_s=time.perf_counter() - began, **figures)


def summarise(run: Run[DhtScaleSettings]) -> Result | None:
    """Put the figures of all studies together, each under its study's name."""
    records = run.records("study")
    if not records:
        return None
    figures: dict[str, Any] = {}
    for record in records:
        name = record["name"]
        figures |= {f"{name}_{key}": value for key, value in record.items() if key not in ("kind", "name")}
    if churns := [record for record in records if record["name"].startswith("churn_")]:
        figures["churn_recall_worst"] = min(record["recall_worst"] for record in churns)
        figures["churn_dead_listed"] = max(record["dead_listed"] for record in churns)
    bars = tuple(bar for bar in BARS if bar.name in figures)
    return Result(title="Experts found in large swarms", figures=figures, bars=bars)


EXPERIMENT = Experiment(measure=measure, summarise=summarise)
