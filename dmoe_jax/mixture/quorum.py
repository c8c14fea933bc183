"""When a batch of expert calls has heard enough.

Each call serves some samples of the batch. A batch goes on once every sample has `k_min` answers, plus a grace time
for the stragglers (Learning@home, appendix on fault tolerance: `timeout_after_k_min`). A sample that has fewer than
`k_min` calls left that could still answer is not waited for: it would hold up the others for nothing.
"""

from collections.abc import Sequence

import numpy as np


class Quorum:
    """Counts answers per sample.

    Args:
      rows_of_call: for each call the indices of the samples that it serves.
      num_samples: samples in the batch.
      k_min: answers that a sample needs.
    """

    def __init__(self, rows_of_call: Sequence[np.ndarray], *, num_samples: int, k_min: int) -> None:
        if k_min < 0:
            raise ValueError(f"k_min must not be negative, got {k_min}")
        self._rows_of_call = [np.asarray(rows) for rows in rows_of_call]
        self._k_min = k_min
        self._answers = np.zeros(num_samples, np.int64)
        self._pending = np.zeros(num_samples, np.int64)
        for rows in self._rows_of_call:
            self._pending[rows] += 1

    def answered(self, call: int) -> None:
        """Call number `call` brought its answer."""
        rows = self._rows_of_call[call]
        self._pending[rows] -= 1
        self._answers[rows] += 1

    def failed(self, call: int) -> None:
        """Call number `call` will not answer."""
        self._pending[self._rows_of_call[call]] -= 1

    @property
    def reached(self) -> bool:
        """Whether every sample has `k_min` answers or no way to get them any more."""
        return bool(((self._answers >= self._k_min) | (self._answers + self._pending < self._k_min)).all())

    @property
    def short_samples(self) -> np.ndarray:
        """Indices of the samples with fewer than `k_min` answers so far."""
        return np.flatnonzero(self._answers < self._k_min)
