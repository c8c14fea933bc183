"""Streaming DiLoCo (Douillard et al., arXiv 2501.18512): fragments of a model are averaged at different times, and the
average arrives while training goes on.

The bytes are those of DiLoCo, but nobody waits for them: with P fragments the peak is P times lower, and with an
overlap of tau steps an average may take as long as these.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from dmoe_jax.arrays import PyTree, all_finite, typed_like, wide
from dmoe_jax.optim.host_state import HostState, Sent, Taken, averaging_optimizer, masked_like
from dmoe_jax.optim.moshpit import Average

OUTER_RATE, OUTER_MOMENTUM = 0.4, 0.9
"""Rate and decay of the Nesterov momentum that the paper found best."""


@HostState.register
class StreamingDiLoCoState(NamedTuple):
    """State of `streaming_diloco`; `due` [P], `arrived` [P] and `taken` as of `HostState`.

    Attributes:
      inner: state of the optimiser inside.
      steps: updates so far.
      rounds: averagings so far, each of one fragment; the number of the next.
      anchor: the parameters after each fragment's last outer step: the same at all peers.
      under_way: the averages that are to arrive, float32, zero where there is none. For each fragment a dict of its
        arrays by their place among those of the parameters, "0" for the first.
      outer: states of the outer optimiser, one for each fragment.
      left: [P], the update after which the fragment left whose average is in `under_way`; None where the host has no
        part, as `due` and `arrived`.
    """

    inner: PyTree
    steps: Int[Array, ""]
    rounds: Int[Array, ""]
    anchor: PyTree
    under_way: tuple[dict[str, Array], ...]
    outer: tuple[PyTree, ...]
    due: Bool[Array, " P"] | None = None
    left: Int[Array, " P"] | None = None
    arrived: Bool[Array, " P"] | None = None
    taken: Taken | None = None

    @property
    def kind(self) -> str:
        return "streaming"

    @property
    def feedback(self) -> None:
        return None

    @property
    def members(self) -> list[list[int]]:
        """For each fragment the places of its arrays among those of the parameters."""
        return [sorted(map(int, fragment)) for fragment in self.under_way]

    def offer(self, params: PyTree, fragment: int) -> Sent:
        """A list of arrays, anchor - theta, float32."""
        anchor, own = jax.tree.leaves(self.anchor), jax.tree.leaves(masked_like(params, self.anchor))
        ways = [wide(anchor[place]) - wide(own[place]) for place in self.members[fragment]]
        return Sent(ways, jnp.array(self.steps))

    def receive(self, sent: Sent, averaged: PyTree | None, fragment: int) -> "StreamingDiLoCoState":
        assert self.due is not None
        assert self.left is not None
        assert self.arrived is not None
        state = self._replace(due=self.due.at[fragment].set(False), rounds=self.rounds + 1)
        if averaged is None:
            return state
        places, under_way = map(str, self.members[fragment]), list(self.under_way)
        under_way[fragment] = {
            at: jnp.array(wide(jnp.asarray(leaf))) for at, leaf in zip(places, averaged, strict=True)
        }
        return state._replace(
            under_way=tuple(under_way),
            left=self.left.at[fragment].set(sent.steps),
            arrived=self.arrived.at[fragment].set(all_finite((averaged, sent.tree))),
        )

    def emptied(self) -> "StreamingDiLoCoState":
        due, arrived = jax.tree.map(jnp.zeros_like, (self.due, self.arrived))
        return self._replace(due=due, arrived=arrived)


def streaming_diloco(
    inner: optax.GradientTransformation,
    *,
    every: int,
    fragments: int | PyTree,
    average: Average | None = None,
    overlap: int = 0,
    mixing: float = 0.5,
    outer: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimiser that averages pseudo-gradients a fragment at a time (algorithm 2 of the paper).

    With H = `every`, fragment p of P and its offset t_p = floor(p H / P), at step t:

        (t - t_p) mod H = 0:        D_p = mean over peers of (anchor_p - theta_p)             leaves
        (t - t_p - tau) mod H = 0:  anchor_p <- OuterOpt(anchor_p, D_p)                       has arrived
                                    theta_p  <- alpha theta_p + (1 - alpha) anchor_p

    One fragment, no overlap and no mixing (alpha = 0) are DiLoCo: `moshpit_average(what="pseudo_gradients")`.
    An average that is lost, or not finite, leaves its fragment to its next one.

    Args:
      inner: any optimiser.
      every: updates between two averagings of the same fragment.
      average: (list of arrays, round_number) -> list, over an axis of `vmap` or `shard_map`; computed when a fragment
        leaves, and kept for tau steps. None: the host averages each fragment that is due while training goes on. What
        comes back within tau steps is used after them, so that peers stay together; what takes longer, at the next
        update.
      fragments: their number P; array i of the model is then in fragment i mod P, which spreads the layers of each over
        the depth of the model (the paper's "strided"). Or a tree with the number of each array's fragment, from 0.
      overlap: tau, updates from the averaging to its use; below `every`. Between hosts at least 2 pass: the average is
        put into the state after one update, and used by the next.
      mixing: alpha, the share of their own parameters that peers keep then. The paper uses 0.5.
      outer: default: SGD with Nesterov momentum, rate 0.4 and 0.9.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    if not 0 <= overlap < every:
        raise ValueError(f"overlap must be from 0 to every - 1 = {every - 1}, got {overlap}")
    if not 0 <= mixing <= 1:
        raise ValueError(f"mixing must be from 0 to 1, got {mixing}")
    if isinstance(fragments, int) and not 1 <= fragments <= every:
        raise ValueError(f"fragments must be from 1 to every = {every}, got {fragments}")
    if outer is None:
        outer = optax.sgd(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    streaming = _Streaming(
        optax.with_extra_args_support(inner), outer, average, every, fragments, overlap, float(mixing)
    )
    return averaging_optimizer("streaming_diloco", streaming.init, streaming.update)


@dataclass(frozen=True, slots=True, eq=False)
class _Streaming:
    """Arguments of `streaming_diloco`, and its `init` and `update`."""

    inner: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformation
    average: Average | None
    every: int
    fragments: int | PyTree
    overlap: int
    mixing: float

    def init(self, params: PyTree) -> StreamingDiLoCoState:
        leaves = jax.tree.leaves(params)
        members = self.members(len(leaves))
        state = StreamingDiLoCoState(
            inner=self.inner.init(params),
            steps=jnp.zeros((), jnp.int32),
            rounds=jnp.zeros((), jnp.int32),
            anchor=jax.tree.map(jnp.array, params),
            under_way=tuple({str(place): jnp.zeros_like(wide(leaves[place])) for place in each} for each in members),
            outer=tuple(self.outer.init([leaves[place] for place in each]) for each in members),
        )
        if self.average is not None:
            return state
        count = len(members)
        due, arrived = jnp.zeros(count, bool), jnp.zeros(count, bool)
        return state._replace(due=due, left=jnp.zeros(count, jnp.int32), arrived=arrived)

    def members(self, count: int) -> list[list[int]]:
        """For each fragment the places of its arrays among `count`."""
        fragments = self.fragments
        if isinstance(fragments, int):
            numbers = [place % fragments for place in range(count)]
            total = min(fragments, count)
        else:
            numbers = jax.tree.leaves(fragments)
            total = max(numbers, default=-1) + 1
        if len(numbers) != count or set(numbers) != set(range(total)) or total > self.every:
            raise ValueError(
                f"expected a fragment from 0 to at most {self.every - 1} for {count} arrays, got {numbers}"
            )
        return [[place for place in range(count) if numbers[place] == fragment] for fragment in range(total)]

    def update(
        self,
        updates: PyTree,
        state: StreamingDiLoCoState,
        params: PyTree,
        *,
        without_gradient: bool = False,
        **extra: Any,
    ) -> tuple[PyTree, StreamingDiLoCoState]:
        if not without_gradient:
            updates, inner = self.inner.update(updates, state.inner, params, **extra)
            state = state._replace(inner=inner, steps=state.steps + 1)
        before, structure = jax.tree.flatten(params)
        moved = [wide(own) + change for own, change in zip(before, jax.tree.leaves(updates), strict=True)]
        offsets = jnp.arange(len(state.members)) * self.every // len(state.members)
        # An offset of 0 leaves after a whole period for the first time: before, nothing was learnt.
        leave_now = (state.steps - offsets) % self.every == 0
        if self.average is not None:
            state = self._averaged(moved, state, leave_now)
            left = state.steps - self.overlap - offsets
            has_left = left >= jnp.where(offsets == 0, self.every, 0)
            is_good = jnp.stack([all_finite(each) for each in state.under_way])
            arrive_now = (left % self.every == 0) & has_left & is_good
        else:
            assert state.due is not None
            assert state.left is not None
            assert state.arrived is not None
            arrive_now = state.arrived & (state.steps - state.left >= self.overlap)
            due = state.due | (leave_now & (not without_gradient))
            state = state._replace(due=due, arrived=state.arrived & ~arrive_now)
        moved, state = self._arrive(moved, state, arrive_now)
        change = [(new - own).astype(own.dtype) for new, own in zip(moved, before, strict=True)]
        return jax.tree.unflatten(structure, change), state

    def _averaged(self, moved: list[Array], state: StreamingDiLoCoState, leave_now: Array) -> StreamingDiLoCoState:
        """The state after the averaging of the fragments that leave now."""

        def average(ways: list[Array], _: list[Array], rounds: Array) -> list[Array]:
            assert self.average is not None
            return [wide(leaf) for leaf in self.average(ways, rounds)]

        anchor, under_way, rounds = jax.tree.leaves(state.anchor), [], state.rounds
        for number, places in enumerate(state.members):
            kept = [state.under_way[number][str(place)] for place in places]
            ways = [wide(anchor[place]) - moved[place] for place in places]
            arrays = jax.lax.cond(leave_now[number], average, lambda _, kept, __: kept, ways, kept, rounds)
            under_way.append(dict(zip(map(str, places), arrays, strict=True)))
            rounds = rounds + leave_now[number]
        return state._replace(under_way=tuple(under_way), rounds=rounds)

    def _arrive(
        self, moved: list[Array], state: StreamingDiLoCoState, arrive_now: Array
    ) -> tuple[list[Array], StreamingDiLoCoState]:
        """Parameters and state after the outer steps of the fragments whose averages are to be used now."""
        anchor, structure = jax.tree.flatten(state.anchor)
        outers = []
        for number, places in enumerate(state.members):
            flying = [state.under_way[number][str(place)] for place in places]
            mine, fixed = [moved[place] for place in places], [anchor[place] for place in places]
            mine, fixed, outer = jax.lax.cond(
                arrive_now[number], self._outer_step, lambda _, *kept: kept, flying, mine, fixed, state.outer[number]
            )
            for place, own, new in zip(places, mine, fixed, strict=True):
                moved[place], anchor[place] = own, new
            outers.append(outer)
        return moved, state._replace(anchor=jax.tree.unflatten(structure, anchor), outer=tuple(outers))

    def _outer_step(
        self, arrived: list[Array], mine: list[Array], anchor: list[Array], outer: PyTree
    ) -> tuple[list[Array], list[Array], PyTree]:
        """(parameters, anchor, outer state) of a fragment whose average is there."""
        updates, outer = self.outer.update(typed_like(arrived, anchor), outer, anchor)
        anchor = optax.apply_updates(anchor, updates)
        kept, taken = self.mixing, 1 - self.mixing
        return [kept * own + taken * wide(new) for own, new in zip(mine, anchor, strict=True)], anchor, outer
