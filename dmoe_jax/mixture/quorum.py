"""When a batch of expert calls has heard enough.

Each call serves some samples of the batch. A batch goes on once every sample has `k_min` answers, plus a grace time
for the stragglers (Learning@home, appendix on fault tolerance: `timeout_after_k_min`). A sample that has fewer than
`k_min` calls left that could still answer is not waited for: it would hold up the others for nothing.
"""

from collections.abc import Sequence

import numpy as np

from net.types import Array


class Quorum:
    """Counts answers per sample.

    Args:
      rows_of_call: for each call the indices of the samples that it serves.
      num_samples: samples in the batch.
      k_min: answers that a sample needs.
    """

    def __init__(self, rows_of_call: Sequence[Array], *, num_samples: int, k_min: int) -> None:
        self._rows_of_call = rows_of_call
        self._k_min = k_min
        self._answers = np.zeros(num_samples, np.int64)
        self._pending = np.zeros(num_samples, np.int64)
        for rows in rows_of_call:
            self._pending[rows] += 1

    def note(self, call: int, *, answered: bool) -> None:
        """Call number `call` brought its answer, or never will."""
        rows = self._rows_of_call[call]
        self._pending[rows] -= 1
        self._answers[rows] += answered

    @property
    def reached(self) -> bool:
        """Whether every sample has `k_min` answers or no way to get them any more."""
        waits = (self._answers < self._k_min) & (self._answers + self._pending >= self._k_min)
        return not np.count_nonzero(waits)
