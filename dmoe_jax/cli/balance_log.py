"""How evenly a run uses its experts: records for the figure, and the whole run for the headline."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dmoe_jax.grid import all_uids, layer_prefix
from dmoe_jax.mixture.fan_out import CallStatistics
from dmoe_jax.models.transformer_xl import TransformerXLConfig
from dmoe_jax.runs.balance import Balance, layer_balances, mean_balance
from dmoe_jax.runs.run_folder import RunFolder


class BalanceLog:
    """Writes "balance" records over the samples since the last ones.

    Args:
      folder: where they go.
      statistics: the running totals to read; what they hold now, from an earlier part of the run, counts as read.
      config: names the layers and their grid.
    """

    def __init__(self, folder: RunFolder, statistics: CallStatistics, config: TransformerXLConfig) -> None:
        self._folder = folder
        self._statistics = statistics
        self._num_layers, self._grid_size = config.num_layers, config.grid_size
        self._begin_window()

    def log(self, step: int) -> None:
        """One record for each layer; none if no sample was sent since the last time."""
        if self._statistics.load == self._load:
            return
        for layer, balance in self._balances(before=self._load, ok=self._ok, failed=self._failed).items():
            self._folder.log("balance", step=step, layer=layer, **asdict(balance))
        self._begin_window()

    def headline(self) -> dict[str, Any]:
        """`load_cv`, `load_entropy`, `dead_experts` and `share_lost` over the whole run."""
        return mean_balance(self._balances(before={}, ok=0, failed=0).values())

    def _balances(self, *, before: Mapping[str, int], ok: int, failed: int) -> dict[str, Balance]:
        """Of each layer, since the totals were these."""
        # A run that was resumed with another grid has sent samples to experts that are none of this one's.
        uids = {str(uid) for layer in range(self._num_layers) for uid in all_uids(layer_prefix(layer), self._grid_size)}
        return layer_balances(
            {uid: samples for uid, samples in self._statistics.load.items() if uid in uids},
            num_layers=self._num_layers,
            grid_size=self._grid_size,
            before=before,
            ok=self._statistics.ok - ok,
            failed=_failed(self._statistics) - failed,
        )

    def _begin_window(self) -> None:
        self._load = dict(self._statistics.load)
        self._ok, self._failed = self._statistics.ok, _failed(self._statistics)


def _failed(statistics: CallStatistics) -> int:
    """Calls that brought no answer in time, for whatever reason."""
    return statistics.failed + statistics.late
