"""The families of a trainer's process: its steps and expert calls, its averaging, and its collaboration."""

from collections import Counter
from collections.abc import Iterator

from dmoe_jax.averaging.settings import Round
from dmoe_jax.collaboration.collaboration import Collaboration
from dmoe_jax.collaboration.settings import GlobalStep
from dmoe_jax.metrics.families import SECONDS, Family, Histogram, Summary, by_label, counter, gauge, histogram, labelled
from dmoe_jax.mixture.statistics import CallRecord, CallStatistics
from dmoe_jax.trainer import StepSpan
from dmoe_jax.training.engine import Totals
from dmoe_net.averaging.grouping.group import Role

_SECONDS_OF_AVERAGES = (*(each for each in SECONDS if each >= 0.01), 100.0, 250.0, 500.0)
"""Bounds for averages, 10 ms to 500 s: a round may wait for its group, and a line may be slow."""


class TrainingRecorder:
    """Counts of one process's training since its start, beside the totals that a run keeps anyway."""

    def __init__(self) -> None:
        self.step_s = Histogram(SECONDS)
        self.calls: dict[str, Histogram] = {}
        """Seconds of expert calls that were answered, by method."""
        self.averages: Counter[str] = Counter()
        """Rounds of averaging by outcome: "ok", "partial" (some numbers did not come back) or "lost"."""
        self.average_s = Histogram(_SECONDS_OF_AVERAGES)
        self.average_bytes = 0.0
        self.average_peers_lost: Counter[str] = Counter()

    def step(self, span: StepSpan) -> None:
        """A trainer's step has ended."""
        self.step_s.observe(span.ended - span.began)

    def call(self, record: CallRecord) -> None:
        """An expert call has ended."""
        if record.outcome == "ok":
            found = self.calls.setdefault(record.method.rpartition(".")[2], Histogram(SECONDS))
            found.observe(record.ended - record.began)

    def round(self, done: Round) -> None:
        """A round of averaging has ended."""
        self.averages["lost" if done.why_lost else "ok" if done.received >= 1 else "partial"] += 1
        self.average_s.observe(done.took_s)
        self.average_bytes += done.moved_bytes
        self.average_peers_lost.update(done.lost.values())

    def global_step(self, done: GlobalStep) -> None:
        """A step of a collaboration was made."""
        self.averages["ok"] += 1
        self.average_s.observe(done.averaged_s)


def training_families(
    recorder: TrainingRecorder, totals: Totals, *, step: int, loss: float | None, unit: str
) -> Iterator[Family]:
    """The families of training: `step` and `loss` are those of the last step, `unit` is what `totals.items` counts."""
    yield counter("dmoe_train_steps_total", "Updates of the trunk, or steps of the whole swarm.", step)
    yield gauge("dmoe_train_loss", "Loss of the last step.", loss)
    yield by_label("counter", "dmoe_train_items_total", "Trained on, by unit.", "unit", {unit: totals.items})
    yield counter("dmoe_train_steps_lost_total", "Steps given up.", totals.steps_lost)
    text = "Time of a trainer's step, or of its micro-batch of a larger one."
    yield histogram("dmoe_train_step_seconds", text, recorder.step_s)
    text = "Updates by other trainers between reading the trunk and updating it."
    staleness = Summary(count=step, total=totals.staleness)
    yield labelled("summary", "dmoe_train_trunk_staleness_updates", text, [({}, staleness)])
    text = "Rounds of averaging with other processes, by outcome."
    yield by_label("counter", "dmoe_train_averages_total", text, "outcome", recorder.averages)
    text = "Time of a round of averaging, whatever came of it; of a swarm's step since the last micro-batch for it."
    yield histogram("dmoe_train_average_seconds", text, recorder.average_s)
    text = "Sent in rounds of averaging: of top-k the bytes of payloads, else of float32 before compression."
    yield counter("dmoe_train_average_sent_bytes_total", text, recorder.average_bytes)
    text = "Members of groups that an average went without, by reason."
    yield by_label("counter", "dmoe_train_average_peers_lost_total", text, "reason", recorder.average_peers_lost)


def call_families(recorder: TrainingRecorder, statistics: CallStatistics) -> Iterator[Family]:
    """The families of a process's expert calls."""
    yield counter("dmoe_train_calls_answered_total", "Expert calls answered in time.", statistics.ok)
    text = "Expert calls that brought nothing, by reason."
    yield by_label("counter", "dmoe_train_calls_failed_total", text, "reason", statistics.failures)
    text = "Expert calls that a busy node asked to come again later."
    yield counter("dmoe_train_calls_asked_again_total", text, statistics.asked_again)
    text = "Expert calls that were asked of another node, because the first had failed."
    yield counter("dmoe_train_calls_moved_total", text, statistics.moved)
    yield by_label("histogram", "dmoe_train_call_seconds", "Time of an answered call.", "kind", recorder.calls)
    text = "Samples that went through a layer with no expert at all."
    yield counter("dmoe_train_samples_without_experts_total", text, statistics.skipped_samples)
    text = "Updates of an expert by other trainers between a forward call and its backward."
    staleness = Summary(count=statistics.staleness_calls, total=statistics.staleness_total)
    yield labelled("summary", "dmoe_train_expert_staleness_updates", text, [({}, staleness)])
    text = "Samples sent through each expert in training."
    yield by_label("counter", "dmoe_train_expert_samples_total", text, "uid", statistics.load)


def collaboration_families(peer: Collaboration) -> Iterator[Family]:
    """The whole swarm of a collaboration as one peer sees it, and what has become of this peer's work."""
    facts, view, totals = peer.facts(), peer.board.view, peer.totals
    yield gauge("dmoe_collaboration_target_samples", "Samples of a whole batch.", facts["target"])
    text = "Samples that all peers together have for the step to come."
    yield gauge("dmoe_collaboration_gathered_samples", text, view.samples)
    text = "Samples that all peers together gather in a second."
    yield gauge("dmoe_collaboration_samples_per_second", text, view.rate)
    yield gauge(
        "dmoe_collaboration_global_step", "Steps of the swarm that this peer has made or taken over.", peer.step
    )
    peers = {role.value: view.count(role) for role in Role}
    yield by_label("gauge", "dmoe_collaboration_peers", "Peers at this step, by role.", "role", peers)
    yield counter("dmoe_collaboration_steps_total", "Steps that this peer made.", totals.steps)
    yield counter("dmoe_collaboration_steps_alone_total", "Of these, with nobody else there.", totals.alone)
    yield counter("dmoe_collaboration_samples_total", "This peer's samples that are in a step.", totals.samples)
    text = "This peer's samples that are in no step."
    yield counter("dmoe_collaboration_samples_lost_total", text, totals.samples_lost)
    yield counter("dmoe_collaboration_states_taken_total", "States taken from others.", totals.states_taken)
    text = "Attempts at a step that came to nothing, by reason."
    yield by_label("counter", "dmoe_collaboration_failures_total", text, "reason", totals.reasons)
