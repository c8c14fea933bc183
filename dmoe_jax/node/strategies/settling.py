"""Settling, before a node serves, by which strategy its experts are run."""

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from typing import Any

from dmoe_jax.node.backend import ExpertBackend, stack_of
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.devices import PlacedDevice
from dmoe_jax.node.host_calls import TooFewThreadsError
from dmoe_jax.node.strategies.choosing import (
    MOST_TRIED_BYTES,
    TYPICAL_EXPERTS,
    TYPICAL_ROWS,
    Choice,
    Measured,
    chosen_by,
    kinds_of,
    measure,
    stack_up,
    why_single,
)

logger = logging.getLogger(__name__)


class Strategies:
    """By which strategy the experts of a node are run; of each kind in each place.

    Args:
      backends: the experts that it begins with, by uid.
      devices: where they live.
      config: has the strategy for all of them, or "auto": what suits each kind; and the rows for which programs are
        compiled before the node serves.
      may_adopt: experts come and go.

    Raises:
      ValueError: all are to be stacked, and some cannot be.
    """

    def __init__(
        self,
        backends: dict[str, ExpertBackend],
        devices: Sequence[PlacedDevice],
        config: NodeConfig,
        *,
        may_adopt: bool,
    ) -> None:
        strategy, warm_up_rows = config.strategy, config.warm_up_rows
        self._devices, self._strategy, self._rows = devices, strategy, max(1, min(warm_up_rows, TYPICAL_ROWS))
        self._kinds = {tuple(uids): [backends[uid] for uid in uids] for uids in kinds_of(backends)}
        self._why = {uids: why_single(own, may_adopt=may_adopt) for uids, own in self._kinds.items()}
        self._choices: list[tuple[tuple[str, str, int], Choice]] = []
        self._measured: dict[Hashable, Measured | None] = {}
        if strategy == "stacked" and may_adopt:
            raise ValueError("the strategy stacked does not do for a node that claims experts: a stack cannot grow")
        if strategy == "stacked" and (refused := [(uids[0], why) for uids, why in self._why.items() if why]):
            raise ValueError(f"the strategy stacked does not do for {refused[0][0]} and its kind: {refused[0][1]}")

    async def settle(self, on_progress: Callable[[str], None]) -> None:
        """Choose, measuring where there is need, and stack what is to be stacked; once, before anything is announced.

        Calls may be answered meanwhile.
        """
        for uids, backends in self._kinds.items():
            device = self._devices[backends[0].place.number].device
            choice = await self._choose(uids, backends)
            if choice.strategy == "stacked" and stack_of(backends[0]) is None:
                await device.run(stack_up, backends)
            kind, place = backends[0].expert.name, backends[0].place.name
            self._choices.append(((kind, place, len(uids)), choice))
            text = f"{len(uids)} experts {kind} in place {place}: {choice.strategy}, since {choice.why}"
            logger.info("%s", text)
            if choice.measured is not None or choice.strategy == "stacked":
                on_progress(text)
        self._kinds.clear()

    def status(self) -> list[dict[str, Any]]:
        """What was chosen for each kind in each place, as plain CBOR data.

        Keys: `expert`, the kind's name; `place`; `experts`, how many; `strategy`; `why`; and if it was measured
        `measured`: `experts` and `rows` of the turn, and its seconds `single_s` and `stacked_s` (None: not tried).
        """
        return [
            {"expert": kind, "place": place, "experts": count, **asdict(choice)}
            for (kind, place, count), choice in self._choices
        ]

    async def _choose(self, uids: tuple[str, ...], backends: Sequence[ExpertBackend]) -> Choice:
        device = self._devices[backends[0].place.number].device
        if stack_of(backends[0]) is not None:
            return Choice(strategy="stacked", why="they have been stacked before")
        if self._strategy != "auto":
            return Choice(strategy="stacked" if self._strategy == "stacked" else "single", why="it was asked for")
        if self._why[uids]:
            return Choice(strategy="single", why=self._why[uids])
        if device.is_simulated:
            return Choice(strategy="single", why="in virtual time there is nothing to measure")
        experts = min(TYPICAL_EXPERTS, len(backends))
        if 2 * experts * backends[0].nbytes > MOST_TRIED_BYTES:
            return Choice(strategy="single", why="they are too large to gain by sharing a program")
        layout = backends[0].place.layout
        alike = (
            backends[0].expert,
            id(backends[0].optimizer),
            layout is None or layout.devices[0].device_kind,
            experts,
        )
        if alike not in self._measured:
            try:
                self._measured[alike] = await device.aside(_measured, backends[0], experts, self._rows)
            except TooFewThreadsError:
                raise  # as single experts they could not run either
            except Exception as error:  # an expert of a user's own may raise anything
                logger.warning("stacking experts %s was tried and failed", backends[0].expert.name, exc_info=error)
                return Choice(strategy="single", why=f"trying the other one raised {type(error).__name__}")
        measured = self._measured[alike]
        if measured is None:
            return Choice(strategy="single", why=f"batches of {self._rows} rows are too large to share a program")
        return chosen_by(measured)


def _measured(backend: ExpertBackend, experts: int, rows: int) -> Measured | None:
    return measure(backend, experts=experts, rows=rows, clock=time.perf_counter)
