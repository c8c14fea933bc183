"""A layer's experts in a swarm, asked until all that were chosen have answered.

Training goes on without an expert that does not answer; a text that is generated shall not depend on who dies
meanwhile. So experts are chosen among all that have been seen alive, by the function that chooses them on one machine,
and those without an answer are asked again, wherever they live then, until patience ends.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import trio

from dmoe_jax.directory.grid import Coordinates, ExpertUid
from dmoe_jax.machine.device import to_host
from dmoe_jax.mixture.remote import MAX_WATCHED_CELLS, RemoteMixture, select_program
from dmoe_jax.routing.base import Scores
from dmoe_jax.trained.decoding import Asked, Run, Unmixed
from dmoe_net.errors import NoQuorum
from dmoe_net.identity import Contact
from dmoe_net.types import Array

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
"""Pauses before experts are asked again: each twice as long as the one before."""
_MOST_SAMPLES, _MOST_BYTES = 512, 32 << 20
"""Samples that are sent at once, and their bytes: nodes have no room for many more."""


class PatientLayer:
    """One layer of a model, whose experts in a swarm answer and do not learn.

    A grid of more than `MAX_WATCHED_CELLS` experts is not known as a whole: there each attempt chooses anew, by beam
    search among the living.

    Args:
      mixture: with a `k_min` of 1 and a `grace_s` of infinity, so that it waits for all answers.
      run: carries out a compiled function.
      patience_s: seconds for which an expert is asked before others take its place, for as long again.
    """

    def __init__(self, mixture: RemoteMixture, run: Run, *, patience_s: float) -> None:
        self._mixture, self._run, self._patience_s = mixture, run, patience_s
        self._select = select_program(mixture.router, mixture.config.k_best)
        self._seen = np.zeros(mixture.router.grid_size, bool)
        self._given_up = np.full(mixture.router.grid_size, -np.inf)  # until when
        self.asked_again = 0
        """Number of times that experts without an answer were asked again."""
        self.replaced = 0
        """Number of times that a word went on with other experts than those that were chosen."""

    async def alive(self) -> Array | None:
        """Return bool [*grid], true for experts that may be chosen now: those that were ever seen alive, but for those
        that have been given up; None for a grid that is not known as a whole.

        Raises:
          NoQuorum: there is none.
        """
        if self._seen.size > MAX_WATCHED_CELLS:
            return None
        await self._living()
        self._seen &= self._given_up <= trio.current_time()
        if not self._seen.any():
            prefix = self._mixture.config.prefix
            raise NoQuorum(f"layer {prefix!r}: no expert has answered for {self._patience_s:g} s")
        return self._seen.copy()

    async def __call__(self, asked: Asked) -> Unmixed:
        """Return what the experts answered: see `Mix`.

        Raises:
          NoQuorum: experts were chosen of which none answers. RouterError: the scores are not numbers.
        """
        scores, inputs, wanted, at, chosen = await to_host(self._mixture.device, tuple(asked))
        self._mixture.check_scores(scores)
        if chosen is None:
            indices, mask, outputs = await self._searched(scores, inputs)
        else:
            indices, mask, outputs = await self._chosen(scores, inputs, wanted, *chosen)
        x = inputs[0]
        if at is not None:
            rows = np.arange(len(at))
            outputs, x = outputs[rows, :, at][:, :, None], x[rows, at][:, None]
        return Unmixed(scores, indices, mask, outputs, x)

    async def _chosen(
        self, scores: Scores, inputs: Any, wanted: Any, indices: Array, mask: Array
    ) -> tuple[Array, Array, Array]:
        """(indices, mask, outputs) of the experts that were chosen, or in the end of others."""
        most = max(1, min(_MOST_SAMPLES, _MOST_BYTES * len(inputs[0]) // max(1, inputs[0].nbytes)))
        spec = self._mixture.expert.output
        while True:
            contacts, mask = await self._living(), mask if wanted is None else mask & wanted[:, None]
            outputs, answered = np.zeros((*mask.shape, *spec.shape), spec.dtype), np.zeros_like(mask)
            with trio.move_on_after(self._patience_s) as waiting:
                pauses = _pauses()
                while (missing := mask & ~answered).any():
                    part = _first_rows(missing, most)
                    new, is_new, _ = await self._mixture.ask(self._mixture.grouped(indices, part, contacts), inputs)
                    outputs[is_new], answered = new[is_new], answered | is_new
                    if (part & ~answered).any():
                        if not self.asked_again:
                            prefix = self._mixture.config.prefix
                            logger.warning("experts of %r do not answer; they are asked again", prefix)
                        self.asked_again += 1
                        await trio.sleep(next(pauses))
                        contacts = await self._living()
                    else:
                        pauses, waiting.deadline = _pauses(), trio.current_time() + self._patience_s
            if np.array_equal(answered, mask):
                return indices, mask, outputs
            self._give_up(indices[mask & ~answered], contacts)
            indices, mask = await to_host(
                self._mixture.device, await self._run(self._select, scores, await self.alive())
            )

    async def _living(self) -> dict[Coordinates, Contact]:
        contacts = await self._mixture.living()
        for coordinates in contacts:
            self._seen[coordinates] = True
        return contacts

    def _give_up(self, coordinates: Array, contacts: Mapping[Coordinates, Contact]) -> None:
        """Do without these experts, and without others that nobody serves now, until patience has passed once more."""
        cells = {tuple(each) for each in coordinates.tolist()}
        cells |= {cell for cell in map(tuple, np.argwhere(self._seen).tolist()) if cell not in contacts}
        for cell in cells:
            self._given_up[cell] = trio.current_time() + self._patience_s
        self.replaced += 1
        names = ", ".join(str(ExpertUid(self._mixture.config.prefix, cell)) for cell in sorted(cells))
        logger.warning("%s did not answer for %g s; the text goes on with other experts", names, self._patience_s)

    async def _searched(self, scores: Scores, inputs: Any) -> tuple[Array, Array, Array]:
        """(indices, mask, outputs) of the best living experts, by beam search, anew until all have answered."""
        for pause_s in _pauses(most_s=self._patience_s):
            choice = await self._mixture.choose(scores)
            asked = np.zeros(choice.indices.shape[:2], bool)
            for call in choice.calls:
                asked[call.rows, call.slots] = True
            outputs, answered, _ = await self._mixture.ask(choice, inputs)
            if asked.any(axis=1).all() and np.array_equal(asked, answered):
                return choice.indices, answered, outputs
            self.asked_again += 1
            await trio.sleep(pause_s)
        raise NoQuorum(f"layer {self._mixture.config.prefix!r}: no expert has answered for {self._patience_s:g} s")


def _pauses(most_s: float = math.inf) -> Iterator[float]:
    """Seconds to wait after each attempt; their sum stays below `most_s`."""
    pause_s, total_s = _FIRST_PAUSE_S, 0.0
    while total_s < most_s:
        yield pause_s
        total_s += pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _first_rows(mask: Array, most: int) -> Array:
    """The mask for the first rows that have anything in it, at most so many rows further."""
    first = int(np.flatnonzero(mask.any(axis=1))[0])
    part = np.zeros_like(mask)
    part[first : first + most] = mask[first : first + most]
    return part
