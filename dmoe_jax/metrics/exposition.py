"""Families as Prometheus' text, exposition format 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats).

The writing itself, with its escapes, is `prometheus_client`'s; importing it takes a while, so whoever shows no metrics
does not import this module.
"""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dmoe_jax.metrics.families import Family, Histogram, Summary

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class _Snapshot(Collector):
    """What `generate_latest` asks for its metrics."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def snapshot(families: Iterable[Family]) -> list[Metric]:
    """The families as they are now, whatever is counted afterwards; so they can be written in another thread.

    Raises:
      ValueError: a counter's name does not end in `_total`, or a name is none that Prometheus knows.
    """
    return [_metric(family) for family in families]


def of_process() -> list[Metric]:
    """What the system says of this process (`process_resident_memory_bytes` and so on); nothing where it says none."""
    return list(ProcessCollector(registry=None).collect())


def as_text(metrics: Sequence[Metric]) -> bytes:
    """Metrics as text, UTF-8."""
    return generate_latest(_Snapshot(metrics))


def _metric(family: Family) -> Metric:
    name = family.name
    if family.kind == "counter":
        if not name.endswith("_total"):
            raise ValueError(f"a counter's name ends in _total, got {name!r}")
        name = name.removesuffix("_total")  # the writer puts it back
    metric = Metric(name, family.text, family.kind)
    for labels, value in family.samples:
        own = dict(labels)
        if isinstance(value, Histogram):
            for bound, count in value.cumulative:
                metric.add_sample(f"{name}_bucket", {**own, "le": floatToGoString(bound)}, count)
            metric.add_sample(f"{name}_sum", own, value.total)
            metric.add_sample(f"{name}_count", own, value.count)
        elif isinstance(value, Summary):
            metric.add_sample(f"{name}_sum", own, value.total)
            metric.add_sample(f"{name}_count", own, value.count)
        else:
            metric.add_sample(family.name, own, value)
    return metric
