"""The strategy by which experts of a kind are run: by programs of their own, or many by one program.

Their size and the device decide, and `NodeConfig.strategy` overrides it. What spans devices or processes, is claimed,
or is the only expert of its kind in its place, is single.

The bounds are from the tables of `experiments.node_speed`: on two cores experts with parameters of 0.4 MB make 1.3 to
2.5 times the samples when they are stacked, those of 0.9 MB 0.94 to 0.99 times as many; on an H200 those of 6 MB make 4
to 15 times as many.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dmoe_jax.node.backend import ExpertBackend, stack_up
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.devices import PlacedDevice
from dmoe_jax.node.programs import nbytes_of
from dmoe_jax.node.stacked import Form, form_for, why_not_alike

logger = logging.getLogger(__name__)

Strategy = Literal["single", "stacked"]

MOST_STACKED_BYTES: dict[Form, int] = {"looped": 512 << 10, "vmapped": 16 << 20}
"""Of the parameters of an expert that gains by sharing a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The strategy of the experts of one kind in one place."""

    strategy: Strategy
    """Which."""
    why: str
    """The reason, in a sentence without its stop."""


class Strategies:
    """The strategies by which the experts of a node are run; of each kind in each place.

    Args:
      backends: the experts that it begins with, by uid.
      devices: where they live.
      config: has the strategy for all of them, or "auto": what suits each kind.
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
        self._devices, self._strategy = devices, config.strategy
        self._kinds = {uids[0]: [backends[uid] for uid in uids] for uids in kinds_of(backends)}
        self._why = {uid: why_single(own, may_adopt=may_adopt) for uid, own in self._kinds.items()}
        self._choices: list[dict[str, Any]] = []
        if config.strategy == "stacked" and may_adopt:
            raise ValueError("the strategy stacked does not do for a node that claims experts: a stack cannot grow")
        if config.strategy == "stacked" and (refused := [(uid, why) for uid, why in self._why.items() if why]):
            raise ValueError(f"the strategy stacked does not do for {refused[0][0]} and its kind: {refused[0][1]}")

    async def settle(self, on_progress: Callable[[str], None]) -> None:
        """Choose, and stack what is to be stacked; once, before anything is announced."""
        for uid, backends in self._kinds.items():
            device = self._devices[backends[0].place.number].device
            choice = self._choose(backends, self._why[uid], is_simulated=device.is_simulated)
            if choice.strategy == "stacked" and backends[0].programs.size == 1:
                await device.run(stack_up, backends)
            kind, place = backends[0].expert.name, backends[0].place.name
            self._choices.append({"expert": kind, "place": place, "experts": len(backends), **asdict(choice)})
            text = f"{len(backends)} experts {kind} in place {place}: {choice.strategy}, since {choice.why}"
            logger.info("%s", text)
            if choice.strategy == "stacked":
                on_progress(text)
        self._kinds.clear()

    def status(self) -> list[dict[str, Any]]:
        """What was chosen for each kind in each place, as plain CBOR data.

        Keys: `expert`, the kind's name; `place`; `experts`, how many; `strategy`; `why`.
        """
        return list(self._choices)

    def _choose(self, backends: Sequence[ExpertBackend], why_single: str, *, is_simulated: bool) -> Choice:
        if backends[0].programs.size > 1:
            return Choice(strategy="stacked", why="they have been stacked before")
        if self._strategy != "auto":
            return Choice(strategy="stacked" if self._strategy == "stacked" else "single", why="it was asked for")
        if why_single:
            return Choice(strategy="single", why=why_single)
        if is_simulated:
            return Choice(strategy="single", why="in virtual time starting a program costs nothing")
        nbytes, form = nbytes_of(backends[0].params), form_for(backends[0].place)
        most, device = MOST_STACKED_BYTES[form], "a CPU" if form == "looped" else "such a device"
        is_small = nbytes <= most
        why = f"parameters of {nbytes} bytes are {'at most' if is_small else 'more than'} {most}, the bound on {device}"
        return Choice(strategy="stacked" if is_small else "single", why=why)


def kinds_of(backends: Mapping[str, ExpertBackend]) -> list[list[str]]:
    """The uids of the experts that could share a stack: of one kind, optimiser and place. In the order of the first."""
    kinds: dict[tuple[int, int], list[str]] = {}
    for uid, backend in backends.items():
        kinds.setdefault((backend.place.number, backend.programs.kind), []).append(uid)
    return list(kinds.values())


def why_single(backends: Sequence[ExpertBackend], *, may_adopt: bool) -> str:
    """The reason why experts of one kind in one place cannot be stacked; empty: they can.

    Args:
      may_adopt: experts come and go while the node serves.
    """
    first = backends[0]
    if first.place.led is not None:
        return "the node is several processes"
    if first.place.layout is not None and first.place.layout.mesh_shape.num_devices > 1:
        return f"they lie on a mesh, {first.place.layout.mesh_shape}"
    if may_adopt:
        return "experts that a node claims come and go, and a stack cannot grow while it serves"
    if len(backends) == 1:
        return "there is only one of them here"
    return "" if first.programs.size > 1 else why_not_alike([each.group.read(each.index) for each in backends])
