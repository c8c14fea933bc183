"""The share of samples that find experts: a layer without any would silently be the identity, so it says so."""

import logging
from collections import deque

from dmoe_jax.mixture.statistics import CallStatistics

logger = logging.getLogger(__name__)

WINDOW_CALLS = 32
"""Calls over which the share is taken. After so many without a gap the next one is worth a warning again."""


class TooFewExperts(RuntimeError):
    """More samples of a layer went without any expert than its user allows. No `NetError`, which a trainer would pass
    over: it would train a model without this layer."""


def check_coverage(statistics: CallStatistics, max_skipped: float) -> None:
    """Raise TooFewExperts if no expert answered for a larger share of a run's samples than `max_skipped`."""
    skipped, samples = statistics.skipped_samples, statistics.samples
    if skipped > max_skipped * samples:
        raise TooFewExperts(
            f"no expert answered for {skipped:,} of {samples:,} samples of the run, and max_skipped allows "
            f"{max_skipped:.0%}: what was trained is little more than the model without its experts"
        )


class Coverage:
    """Watches the samples of one layer that no expert answered for.

    Args:
      prefix: of the layer's experts, for messages.
      max_skipped: the largest share of samples without an expert, over the last `WINDOW_CALLS` calls.
      instead: what such a sample gets, for the warning.
    """

    def __init__(self, prefix: str, *, max_skipped: float, instead: str) -> None:
        self._prefix = prefix
        self._max_skipped = max_skipped
        self._instead = instead
        self._shares: deque[float] = deque(maxlen=WINDOW_CALLS)
        self._warned = False

    def note(self, skipped: int, samples: int, *, found: int, answered: int) -> None:
        """Record one call of the layer: of `samples` `skipped` had no expert, of `found` living ones some `answered`.

        Raises:
          TooFewExperts: the share of samples without an expert exceeds `max_skipped`. Calls that were not made yet
            count as complete.
        """
        self._shares.append(skipped / samples if samples else 0.0)
        state = f"{found} experts were found alive and asked, {answered} of them answered"
        if skipped and not self._warned:
            self._warned = True
            logger.warning(
                "layer %r: no expert for %d of %d samples (%s); %s, until experts come back",
                *(self._prefix, skipped, samples, state, self._instead),
            )
        elif self._warned and len(self._shares) == WINDOW_CALLS and not any(self._shares):
            self._warned = False
            logger.info("layer %r: every sample of the last %d calls had an expert", self._prefix, WINDOW_CALLS)
        share = sum(self._shares) / WINDOW_CALLS
        if share > self._max_skipped:
            raise TooFewExperts(
                f"layer {self._prefix!r}: no expert for {share:.0%} of the samples of the last {WINDOW_CALLS} calls; "
                f"max_skipped allows {self._max_skipped:.0%}; in the last call {state}"
            )
