"""One case's processes, and the slices in which its sides take turns."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.node_speed.cases import Case, callers_of_processes, neighbours, rate_between
from experiments.processes import HelperProcess, open_helpers

_LEAD_S = 0.3
"""Before a slice begins: its callers are at work by then, and the queue is as long as it will be."""

_HIVEMIND_SLICES = 2
"""Its calls are few and come in bursts: it gets this many times as long."""

_HANDLERS = 2
"""hivemind's processes that hold connections, as in the measurements that the bars come from."""

Quantities = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAndCallers:
    """A node and those who ask it, each a process.

    Attributes:
      case: what is served and asked.
      node: the node's process.
      callers: those of its callers.
    """

    case: Case
    node: HelperProcess
    callers: Sequence[HelperProcess]

    def serve(self, slice_s: float) -> Quantities:
        """Have all callers call for a slice.

        Returns:
          `samples_per_s`; the node's `mean_batch` rows, processor seconds a second (`cpu_share`, and by these
          `samples_per_cpu_s`) and share of time that its device worked, as far as there is any; and of layer calls the
          longest and the medians.

        Raises:
          HelperFailed: a process has ended.
        """
        counts: list[dict[str, Any]] = []
        answers = take_slice(self.callers, slice_s, at_ends=lambda: counts.append(self.node.ask(do="count")))
        return served_record(counts[0], counts[1], answers, slice_s)

    def bare(self, rows: float, for_s: float) -> Quantities:
        """Time bare calls of the node's programs, while nobody calls it.

        Args:
          rows: of each call; between two whole numbers both are timed.
          for_s: seconds to go on.
        """
        each = sorted(set(neighbours(rows)))
        answers = [self.node.ask(do="bare", rows=number, for_s=for_s / len(each)) for number in each]
        seconds = [answer["forward_s"] + answer["backward_s"] for answer in answers]
        rate = rate_between(rows, (seconds[0], seconds[-1]))
        cpu_share = sum(answer["cpu_share"] for answer in answers) / len(answers)
        return with_samples_per_cpu_s({**answers[-1], "samples_per_s": rate, "rows": rows, "cpu_share": cpu_share})


def served_record(
    before: Mapping[str, Any], after: Mapping[str, Any], answers: Sequence[Mapping[str, Any]], slice_s: float
) -> Quantities:
    """Compute the quantities of a slice.

    Args:
      before, after: the node's counters at its begin and end.
      answers: what each process of callers said.
      slice_s: its duration, seconds.
    """
    grown = {name: after[name] - before[name] for name in ("rows", "batches", "busy_s", "cpu_s", "compilations")}
    record: Quantities = {
        "samples_per_s": sum(answer["samples"] for answer in answers) / slice_s,
        "layer_calls": sum(answer["layer_calls"] for answer in answers),
        "busy_share": grown["busy_s"] / slice_s,
        "cpu_share": grown["cpu_s"] / slice_s,
        "compilations": grown["compilations"],
    }
    if grown["batches"]:
        record["mean_batch"] = grown["rows"] / grown["batches"]
    for name in ("forward_s", "backward_s"):
        if longest := [answer[f"longest_{name}"] for answer in answers if f"longest_{name}" in answer]:
            record[f"longest_{name}"] = max(longest)
            # Of the processes' medians: every process has about as many callers.
            medians = sorted(answer[name] for answer in answers if name in answer)
            record[name] = medians[len(medians) // 2]
    return with_samples_per_cpu_s(record)


def with_samples_per_cpu_s(record: Quantities) -> Quantities:
    """The record with `samples_per_cpu_s`, samples for each second of a processor, if its process used any."""
    if not record["cpu_share"]:
        return record
    return record | {"samples_per_cpu_s": record["samples_per_s"] / record["cpu_share"]}


def take_slice(
    helpers: Sequence[HelperProcess], slice_s: float, *, at_ends: Callable[[], object] = lambda: None
) -> list[dict[str, Any]]:
    """Order a slice, wait for it, and return what each helper said of it.

    Args:
      helpers: processes that take the order {"begin", "end"}.
      slice_s: its duration, seconds.
      at_ends: called when it begins, and when it ends.
    """
    begin = time.perf_counter() + _LEAD_S
    end = begin + slice_s
    for helper in helpers:
        helper.tell(begin=begin, end=end)
    for moment in (begin, end):
        time.sleep(max(0.0, moment - time.perf_counter()))
        at_ends()
    return [helper.hear() for helper in helpers]


@contextmanager
def open_node(case: Case, *, processes: int, seed: int) -> Iterator[NodeAndCallers]:
    """Start a node that serves a case, and then its callers.

    Args:
      case: what is served and asked.
      processes: what the callers share.
      seed: of all that is drawn.

    Raises:
      HelperFailed: one of them did not start.
    """
    common = {"case": asdict(case), "seed": seed}
    with ExitStack() as stack:
        (node,) = stack.enter_context(open_helpers("experiments.node_speed.node", [common]))
        each = [
            common | {"contact": node.hello["contact"], "callers": callers, "number": number}
            for number, callers in enumerate(callers_of_processes(case.callers, processes))
        ]
        callers = stack.enter_context(open_helpers("experiments.node_speed.caller", each))
        yield NodeAndCallers(case=case, node=node, callers=callers)


@contextmanager
def open_hivemind(case: Case, *, python: Path, seed: int) -> Iterator[Callable[[float], Quantities]]:
    """Start hivemind's server and callers; yields what has them take a slice.

    Args:
      case: what is served and asked.
      python: interpreter that has hivemind.
      seed: of all that is drawn.

    Raises:
      HelperFailed: it did not start.
    """
    with tempfile.TemporaryDirectory(prefix="hv") as sockets:  # a short name: those of sockets may have 107 characters
        settings = {"case": asdict(case), "seed": seed, "handlers": _HANDLERS, "sockets": sockets}
        with open_helpers("experiments.node_speed.hivemind_side", [settings], python=str(python)) as (side,):

            def serve(slice_s: float) -> Quantities:
                (answer,) = take_slice([side], _HIVEMIND_SLICES * slice_s)
                return {"samples_per_s": answer["samples"] / (_HIVEMIND_SLICES * slice_s)}

            yield serve
