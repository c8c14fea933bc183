"""How evenly a run uses its experts: a record for each layer and window, the last of them for the headline."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dmoe_jax.runs.balance import Balance, layer_balances, mean_balance
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.training.engine import Totals


class BalanceLog:
    """Writes "experts" records of the cumulative load, and "balance" records over the samples since the last ones.

    Args:
      folder: where they go.
      layers: layer -> uids of its experts.
      totals: as they are where the first window begins; what a resumed run has counted already belongs to none.
    """

    def __init__(self, folder: RunFolder, layers: Mapping[str, tuple[str, ...]], totals: Totals) -> None:
        self._folder = folder
        self._layers = layers
        self._before = totals
        self._last: Mapping[str, Balance] = {}

    def log_load(self, totals: Totals, **place: object) -> None:
        """The load of all experts since the run began, and who serves them; nothing for a dense model."""
        if self._layers:
            self._folder.log("experts", **place, load=totals.load, peer=totals.peers)

    def log(self, totals: Totals, **place: object) -> None:
        """The load, and the balance of each layer; nothing if no sample was sent since the last time."""
        if not self._layers or totals.load == self._before.load:
            return
        self.log_load(totals, **place)
        self._last = self._balances(totals, self._before)
        for layer, balance in self._last.items():
            self._folder.log("balance", **place, layer=layer, **asdict(balance))
        self._before = totals

    def headline(self, totals: Totals) -> dict[str, Any]:
        """`load_cv`, `load_entropy`, `dead_experts` and `share_lost` of the last window, where a collapse shows."""
        if not self._layers:
            return {}
        return mean_balance((self._last or self._balances(totals, Totals())).values())

    def _balances(self, totals: Totals, before: Totals) -> dict[str, Balance]:
        # A run that was resumed with another grid has sent samples to experts that are none of this one's.
        known = {uid for uids in self._layers.values() for uid in uids}
        return layer_balances(
            {uid: samples for uid, samples in totals.load.items() if uid in known},
            self._layers,
            before=before.load,
            ok=totals.calls_ok - before.calls_ok,
            failed=totals.calls_failed - before.calls_failed,
        )
