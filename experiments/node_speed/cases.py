"""Experts and callers in each part of the measurement. Nothing here imports JAX: the command line reads it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Strategy = Literal["single", "stacked"]
STRATEGIES: tuple[Strategy, ...] = ("single", "stacked")
"""Strategies by which a node runs its experts, see `dmoe_jax.node.stacked`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Experts on one node, and the callers that keep it busy.

    Raises:
      ValueError: a caller cannot ask so many experts at once, or a request is larger than a batch may be.
    """

    name: str
    """In the names of slices and figures."""
    experts: int
    """Experts on the node."""
    d_model: int
    """Their width; each has about 8 d_model^2 parameters."""
    rows: int
    """Rows of a request to one expert; with `is_mixed` the most."""
    callers: int
    """Callers at once, each with one layer call under way."""
    at_once: int = 1
    """Experts that a layer call goes to. A caller's layer call has `rows` samples, and each goes to all of these."""
    max_batch_rows: int = 256
    """As of `NodeConfig`. All sizes up to it are compiled before the node serves."""
    is_mixed: bool = False
    """True if each layer call draws its number of rows, from 1 to `rows`, small ones as often as large ones."""

    def __post_init__(self) -> None:
        if not 1 <= self.at_once <= self.experts:
            raise ValueError(f"a caller can ask 1 to {self.experts} experts at once, got {self.at_once}")
        if not 1 <= self.rows <= self.max_batch_rows:
            raise ValueError(f"a request has 1 to {self.max_batch_rows} rows, got {self.rows}")

    @property
    def parameters(self) -> int:
        """Numbers in the parameters of all experts: two matrices, their biases, scale and bias of a norm."""
        return self.experts * (8 * self.d_model**2 + 7 * self.d_model)

    @property
    def state_bytes(self) -> int:
        """Bytes of all parameters and of Adam's two moments and count, float32 and int32."""
        return 4 * (3 * self.parameters + self.experts)


def callers_of_processes(callers: int, processes: int) -> tuple[int, ...]:
    """Return each process's number of callers: as even as can be, the first ones one more; none is left without."""
    used = min(callers, processes)
    return tuple(callers // used + (index < callers % used) for index in range(used))


def width_of(parameter_mb: float) -> int:
    """The width, a multiple of 8, of the expert whose float32 parameters come nearest to so many megabytes (10^6)."""
    return max(8, 8 * round((parameter_mb * 1e6 / 32) ** 0.5 / 8))


def neighbours(mean_rows: float) -> tuple[int, int]:
    """The whole numbers of rows on either side of a mean; both the same if it is one."""
    if mean_rows < 1:
        raise ValueError(f"a batch has at least one row, got a mean of {mean_rows}")
    least = int(mean_rows)
    return least, least if mean_rows == least else least + 1


def rate_between(mean_rows: float, seconds: Sequence[float]) -> float:
    """Samples per second of calls with `mean_rows` rows on average.

    Args:
      mean_rows: may lie between two numbers of rows.
      seconds: of a call with each of `neighbours(mean_rows)`; the time between them is taken to be linear.
    """
    least, _ = neighbours(mean_rows)
    below, above = seconds
    return mean_rows / (below + (mean_rows - least) * (above - below))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """Sizes of the demonstration's model that are no defaults of `TransformerXLConfig`; those of `dmoe train` are."""

    num_layers: int = 2
    grid_size: tuple[int, ...] = (4, 4)
    k_best: int = 4
    cutoffs: tuple[int, ...] = (2000, 10_000)
    batch_size: int = 4


DEMONSTRATION = Demonstration()
ROUTERS = {"token": "balanced", "sequence": "product_key"}
"""Routers of the demonstration, where tokens have experts of their own, and where sequences do."""
