"""The mixture over the network: the same mathematics as `mixture.local`, with experts on other machines.

One layer of one step:

    scores  = router.scores(gate, features)                      jitted segment of the model
    choices = beam search for the k_best live experts, or        DHT, cached
              router.select over all that are alive
    outputs = one request per node, with a part for each of      network, k_min and grace
              its experts that were chosen
    mixed   = x + sum_k weights_k (outputs_k - x), weights of those that answered       jitted segment

Learning@home section 3.1 and 3.3; hivemind sends one request per (sample, expert) pair instead. An expert that does
not answer is masked and the weights renormalised over the others; in the backward pass an expert that is lost is a
constant: it passes no gradient to its inputs. No row is ever NaN.

A `RemoteMixture` is called on the tape of `dmoe_jax.autodiff`, or part by part (`choose`, `forward`, `backward`) with
arrays on the host, from which `dmoe_jax.mixture.flax_layers` makes a layer that lives under `jit`.
"""

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from dmoe_jax.autodiff import Recording, Value
from dmoe_jax.directory.grid import Coordinates, ExpertUid, check_prefix
from dmoe_jax.experts.base import Expert
from dmoe_jax.machine.device import Device, to_host
from dmoe_jax.machine.remembered import remembered
from dmoe_jax.mixture.capacity import grid_capacity, relative_to_median
from dmoe_jax.mixture.combine import combine_outputs
from dmoe_jax.mixture.config import MixtureConfig
from dmoe_jax.mixture.expert_calls import BACKWARD, FORWARD, ExpertCall
from dmoe_jax.mixture.fan_out import ExpertCaller
from dmoe_jax.mixture.readiness import check_experts
from dmoe_jax.mixture.rows import mixed_by_rows, rows_of
from dmoe_jax.mixture.statistics import Coverage
from dmoe_jax.routing.base import Router, RouterError, Scores, Traffic, check_weights, combine_weights, router_loss
from dmoe_jax.routing.check import check_finite
from dmoe_net.errors import NoQuorum
from dmoe_net.identity import Contact
from dmoe_net.types import Array

MAX_WATCHED_CELLS = 4096
"""Most cells of a grid all of whose experts a balanced router hears of. To look at a larger one would ask the DHT for
every row; there all experts count as alike."""


class Choice(NamedTuple):
    """The experts that a batch goes to.

    Attributes:
      indices: int32 [batch, slots, dims], coordinates of each sample's experts; of no meaning in empty slots.
      calls: one for each distinct expert.
      traffic: for a router that heeds it; None for others.
    """

    indices: Array
    calls: tuple[ExpertCall, ...]
    traffic: Traffic | None = None


class Residual(NamedTuple):
    """The part of a forward pass that its backward pass needs.

    Attributes:
      inputs: the experts' inputs, each [batch, ...].
      answered: the calls that were answered, each at the node that did, with the expert's updates as `seen`. The
        backward pass goes there and says so.
      body: the requests' words beside their parts, which the backward pass repeats.
    """

    inputs: Sequence[Array]
    answered: list[ExpertCall]
    body: dict[str, Any]


class RemoteMixture:
    """One DMoE layer whose experts are remote. Made by `Swarm.mixture`; holds no parameters and no state of a step.

    Args:
      expert: specification of the experts; only its input and output shapes are used here.
      caller: finds the living experts and calls them. device: waits for XLA off the event loop.
      seed: of the dropout in experts that take a key, with the layer's prefix.
    """

    def __init__(
        self,
        *,
        expert: Expert,
        router: Router,
        caller: ExpertCaller,
        device: Device,
        config: MixtureConfig,
        seed: int = 0,
    ) -> None:
        check_prefix(config.prefix)
        check_weights(router, config.k_best)
        self.expert = expert
        self.router = router
        self.config = config
        self.select, self.mix = select_program(router, config.k_best), mix_segment(router)
        """The router's programs: selection over the whole grid, and the segment that mixes."""
        self.statistics = caller.statistics
        """Totals of the expert calls of all mixtures that share this one's caller."""
        self._caller = caller
        self.device = device
        self._rng = random.Random(f"{seed} {config.prefix}")
        instead = "pass unchanged" if expert.is_residual else "give zeros"
        self._coverage = Coverage(config.prefix, max_skipped=config.max_skipped, instead=f"such samples {instead}")

    async def __call__(self, run: Recording, scores: Scores, *inputs: Value | Any) -> tuple[Value, Value]:
        """Mix the experts' outputs for a batch of samples.

        Args:
          run: the step's recording.
          scores: the router's, see `dmoe_jax.routing.base.score`, on the tape.
          inputs: the experts' inputs, each [batch, ...]; a sample without experts returns the first.
        Returns: (mixed [batch, ...], the router's auxiliary loss, a scalar).
        Raises:
          NoQuorum: with `on_shortfall="raise"`, when some sample has fewer than `k_min` answers.
          TooFewExperts: too many samples have none at all, see `MixtureConfig.max_skipped`.
          RouterError: the router's scores are not numbers, or it selected no expert that exists.
        """
        if (rows := rows_of(scores)) is not None:
            return await mixed_by_rows(self, rows, run, scores, inputs)
        choice = await self.choose(await to_host(self.device, jax.tree.map(lambda value: value.value, scores)))
        seed = self.dropout_seed() if run.differentiates else None
        outputs, answered = await run.call(_LayerCall(self, choice, seed), *inputs)
        return run(self.mix, scores, choice.indices, answered, outputs, inputs[0], choice.traffic)

    def dropout_seed(self) -> int | None:
        """The seed of the next training call's dropout, 63 bits; None for experts that take no key."""
        return self._rng.getrandbits(63) if self.expert.takes_key else None

    async def living(self) -> dict[Coordinates, Contact]:
        """The experts of this layer that are alive, and the nodes that serve them."""
        return await self._caller.directory.living(self.config.prefix, self.router.grid_size)

    async def alive(self) -> Array:
        """True for each expert that is alive: bool, of the grid's shape."""
        alive = np.zeros(self.router.grid_size, bool)
        for coordinates in await self.living():
            alive[coordinates] = True
        return alive

    async def choose(self, scores: Scores) -> Choice:
        """The experts of each sample, by beam search through the directory, or for routers that must see the whole grid
        by `router.select` over all that are alive. The scores are arrays on the host. Raises RouterError as
        `__call__`."""
        prefix, k_best = self.config.prefix, self.config.k_best
        self.check_scores(scores)
        if self.router.whole_grid:
            alive = await self.alive()
            indices, mask = await to_host(self.device, await self.device.run(self.select, scores, alive))
            return await self.choose_selected(indices, mask, alive)
        logits, _, bias = cast(tuple[list[Array], Any, list[Array]], scores)
        if len(bias) == len(logits):  # additive as the scores are
            logits, bias = [part + own for part, own in zip(logits, bias, strict=True)], []
        indices, contacts = await self._caller.directory.beam_search(
            prefix, logits, k_best, bias=bias[0] if bias else None
        )
        choice = self.grouped(np.maximum(indices, 0).astype(np.int32), indices[..., 0] >= 0, contacts)
        return await self._with_traffic(choice)

    def check_scores(self, scores: Scores) -> None:
        """Raise RouterError unless the scores and their bias are numbers; see `check_finite`."""
        check_finite(self.router, cast(tuple[np.ndarray, ...], (*scores.logits, *scores.bias)), self.config.prefix)

    async def choose_selected(self, indices: Array, mask: Array, alive: Array) -> Choice:
        """The experts that `router.select` chose among those of `alive`; those that have died since are left out.
        Raises RouterError if some of them were not alive."""
        for coordinates in map(tuple, indices[mask].tolist()):
            if not alive[coordinates]:
                where = f"{coordinates} of {self.config.prefix}"
                raise RouterError(f"router {self.router.name!r}: selected {where}, which is not alive")
        return await self._with_traffic(self.grouped(np.asarray(indices, np.int32), mask, await self.living()))

    def grouped(self, indices: Array, mask: Array, contacts: Mapping[Coordinates, Contact]) -> Choice:
        """The choice of these experts: a call for each distinct one that has a contact, several of like size if one had
        too many rows.

        Args:
          indices: int32 [batch, slots, dims], coordinates. mask: bool [batch, slots], true for slots that are wanted.
          contacts: the node to ask for each expert, as of `living`.
        """
        places: dict[Coordinates, list[tuple[int, int]]] = {}
        for row, slot in np.argwhere(mask).tolist():
            places.setdefault(tuple(indices[row, slot].tolist()), []).append((row, slot))
        calls = []
        for coordinates, pairs in places.items():
            if coordinates in contacts:
                uid = str(ExpertUid(self.config.prefix, coordinates))
                rows, slots = np.array(pairs).T
                calls += self._split(ExpertCall(uid=uid, contact=contacts[coordinates], rows=rows, slots=slots))
        return Choice(indices, tuple(calls))

    async def _with_traffic(self, choice: Choice) -> Choice:
        """The choice with what a router heeds of it, if it heeds anything."""
        if not self.router.heeds_traffic:
            return choice
        asked, capacity = np.zeros(choice.indices.shape[:2], bool), None
        for call in choice.calls:
            asked[call.rows, call.slots] = True
        if self.knows_capacity:
            living, directory = await self.living(), self._caller.directory
            hosts = {contact.peer_id for contact in living.values()}
            published = {host: seconds for host, seconds in directory.call_seconds().items() if host in hosts}
            slowness = {**relative_to_median(published), **self._caller.slowness(hosts)}
            capacity = grid_capacity(living, self.router.grid_size, slowness)
        return choice._replace(traffic=cast(Any, Traffic)(asked, capacity))

    def _split(self, call: ExpertCall) -> list[ExpertCall]:
        """The call, or several of like size where it has more rows than its node takes in one, as far as is known."""
        most = min(self.config.max_rows, self._caller.most_rows.get(call.contact.peer_id, self.config.max_rows))
        if len(call.rows) <= most:
            return [call]
        count = -(-len(call.rows) // most)
        pairs = zip(np.array_split(call.rows, count), np.array_split(call.slots, count), strict=True)
        return [replace(call, rows=rows, slots=slots) for rows, slots in pairs]

    @property
    def knows_capacity(self) -> bool:
        """True if the router heeds the capacity of experts, and there are not too many to know them all."""
        return self.router.heeds_traffic and math.prod(self.router.grid_size) <= MAX_WATCHED_CELLS

    async def forward(
        self, choice: Choice, inputs: Sequence[Array], dropout_seed: int | None = None
    ) -> tuple[Array, Array, Residual]:
        """Ask the chosen experts.

        Args:
          inputs: the experts' inputs, arrays on the host, [batch, ...].
          dropout_seed: in training, from `dropout_seed`; None: nothing is random.
        Returns: (outputs [batch, slots, ...], zeros where nobody answered; answered, bool [batch, slots]; residual).
        Raises:
          NoQuorum, TooFewExperts: as `__call__`.
        """
        outputs, answered, residual = await self.ask(choice, inputs, dropout_seed)
        config, answers = self.config, np.count_nonzero(answered, axis=1)
        num_found, num_replied = (len({call.uid for call in calls}) for calls in (choice.calls, residual.answered))
        skipped = len(answers) - int(np.count_nonzero(answers))
        self.statistics.samples += len(answers)
        self.statistics.skipped_samples += skipped
        self._coverage.note(skipped, len(answers), found=num_found, answered=num_replied)
        short = np.flatnonzero(answers < config.k_min)
        if short.size and config.on_shortfall == "raise":
            raise NoQuorum(
                f"layer {config.prefix!r}: {short.size} of {len(answers)} samples got fewer than "
                f"k_min={config.k_min} answers from experts"
            )
        return outputs, answered, residual

    async def ask(
        self, choice: Choice, inputs: Sequence[Array], dropout_seed: int | None = None
    ) -> tuple[Array, Array, Residual]:
        """Do as `forward`, whatever is not answered: for a caller who asks again."""
        spec, calls, asked = self.expert.output, choice.calls, self.statistics.asked
        for call in calls:
            asked[call.uid] = asked.get(call.uid, 0) + len(call.rows)
        residual = Residual(inputs, [], {} if dropout_seed is None else {"dropout_seed": dropout_seed})
        ask = functools.partial(
            self._caller.fan_out, FORWARD, inputs=inputs, replies=[spec], config=self.config, common=residual.body
        )
        answers = await ask(calls)
        # A node that has just said that it takes fewer rows in a call has done nothing, and is asked in parts.
        in_vain = [self._split(call) for call, each in zip(calls, answers, strict=True) if each is None]
        if parts := [part for split in in_vain if len(split) > 1 for part in split]:
            answers += await ask(parts)
        outputs = np.zeros((*choice.indices.shape[:2], *spec.shape), spec.dtype)
        answered = np.zeros(choice.indices.shape[:2], bool)
        for each in answers:
            if each is not None:
                call, answer = each
                outputs[call.rows, call.slots] = answer.tensors[0]
                answered[call.rows, call.slots] = True
                residual.answered.append(replace(call, seen=answer.updates))
        return outputs, answered, residual

    async def backward(self, residual: Residual, output_grads: Array) -> tuple[Array | None, ...]:
        """Send the outputs' gradients to the experts that answered, which learn from them. Return the gradient of each
        differentiable input, [batch, ...], None for the others; an expert that does not answer counts as a constant."""
        specs, batch = self.expert.inputs, len(output_grads)
        sums = [np.zeros((batch, *spec.shape), spec.dtype) if spec.differentiable else None for spec in specs]
        returned = await self._caller.fan_out(
            BACKWARD,
            residual.answered,
            inputs=residual.inputs,
            output_grads=output_grads,
            replies=[spec for spec in specs if spec.differentiable],
            config=self.config,
            common=residual.body,
        )
        wanted = [array for array in sums if array is not None]
        for each in returned:
            if each is not None:
                call, answer = each
                for array, grad in zip(wanted, answer.tensors, strict=True):
                    _add_rows(array, call.rows, grad)
                self._note_update(call, answer.updates)
        return tuple(sums)

    async def check(self, *, timeout_s: float = 60.0, say: Callable[[str], None] = lambda _: None) -> int:
        """Wait until the layer has an expert that answers, and make sure that it is of our kind. Return how many are.

        An expert of each node is asked: one that does not answer, or is of another kind, is not counted.

        Args:
          timeout_s: longest wait, seconds.
          say: is told once a second what is waited for, and at the end how many experts are alive.
        Raises:
          NoQuorum: there is none; the message says which prefixes this swarm serves.
          ExpertMismatch: its tensors have other shapes or types, or it computes otherwise; a ValueError.
          VersionMismatch: its node speaks another version of calls.
        """
        return await check_experts(
            self.expert, self.config.prefix, self.router.grid_size, self._caller, timeout_s=timeout_s, say=say
        )

    def _note_update(self, call: ExpertCall, updates: int | None) -> None:
        statistics = self.statistics
        statistics.load[call.uid] = statistics.load.get(call.uid, 0) + len(call.rows)
        if call.seen is not None and updates is not None:  # a copy that was asked in another's place was not seen
            # Our own update is not staleness; an expert that does not learn, or was restarted, shows none.
            statistics.staleness_total += max(0, updates - call.seen - 1)
            statistics.staleness_calls += 1


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """The remote call of one layer in one step, for the tape: (outputs, True for each expert that answered)."""

    mixture: RemoteMixture
    choice: Choice
    dropout_seed: int | None

    async def forward(self, *inputs: Any) -> tuple[tuple[Array, Array], Residual]:
        host = await to_host(self.mixture.device, inputs)
        outputs, answered, residual = await self.mixture.forward(self.choice, host, self.dropout_seed)
        return (outputs, answered), residual

    async def backward(self, residual: Residual, output_grads: tuple[Any, Any]) -> tuple[Any, ...]:
        return await self.mixture.backward(residual, await to_host(self.mixture.device, output_grads[0]))


def _add_rows(array: Array, rows: Array, grads: Array) -> None:
    rises = np.count_nonzero(rows[1:] > rows[:-1]) == len(rows) - 1  # the usual case, and faster than to sort
    if rises or len(np.unique(rows)) == len(rows):
        array[rows] += grads
    else:  # a router that selects an expert twice for a sample: += would keep one gradient of the two
        np.add.at(array, rows, grads)


@remembered(16)
def select_program(router: Router, k: int) -> Callable[[Scores, Array], Any]:
    """The compiled (scores, alive) -> (indices, mask) of this router, made once."""
    return jax.jit(lambda scores, alive: router.select(scores, k, alive))


@remembered(16)
def mix_segment(router: Router) -> Callable[..., tuple[Any, Any]]:
    """The segment (scores, indices, answered, outputs, x, traffic) -> (mixed, aux_loss) for this router, made once."""

    def mix(
        scores: Scores, indices: Any, answered: Any, outputs: Any, x: Any, traffic: Traffic | None = None
    ) -> tuple[Any, Any]:
        mixed = combine_outputs(combine_weights(router, scores, indices, answered), answered, outputs, x)
        return mixed, router_loss(router, scores, indices, answered, traffic)

    return mix
