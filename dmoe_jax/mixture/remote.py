"""The mixture over the network: the same mathematics as `mixture.local`, with experts on other machines.

One layer of one step:

    scores  = router.scores(gate, features)                      jitted segment of the model
    choices = beam search for the k_best live experts, or        DHT, cached
              router.select over all that are alive
    outputs = one call per distinct expert, not per sample       network, k_min and grace
    mixed   = x + sum_k weights_k (outputs_k - x), weights of those that answered       jitted segment

Learning@home section 3.1 and 3.3; hivemind sends one request per (sample, expert) pair instead. An expert that does
not answer is masked and the weights renormalised over the others; in the backward pass an expert that is lost is a
constant: it passes no gradient to its inputs. A sample without any expert goes through unchanged (experts carry their
own residual connection), and no row is ever NaN.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import numpy as np

from dmoe_jax.autodiff import Recording, Value
from dmoe_jax.device import Device, to_host
from dmoe_jax.directory import ExpertDirectory
from dmoe_jax.experts.base import Expert
from dmoe_jax.grid import ExpertUid, format_uid
from dmoe_jax.mixture.fan_out import CallPolicy, ExpertCall, ExpertCaller
from dmoe_jax.mixture.local import combine_outputs
from dmoe_jax.routing.base import Router, RouterError, Scores, gather_logits
from dmoe_jax.routing.check import check_finite
from net.errors import NoQuorum
from net.identity import Contact
from net.rpc.base import Reply
from net.types import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """Settings of a remote mixture."""

    prefix: str
    """Experts are `prefix.i.j`; one prefix a layer."""
    k_best: int = 4
    """Experts asked for each sample."""
    policy: CallPolicy = field(default_factory=CallPolicy)
    """Quorum, deadlines and compression, forward and backward."""
    on_shortfall: str = "skip"
    """What happens to a sample with fewer than `k_min` answers: "skip" mixes what there is (with nothing, the sample
    passes unchanged), "raise" gives the step up with `NoQuorum`."""

    def __post_init__(self) -> None:
        if self.k_best < 1 or self.policy.k_min > self.k_best:
            raise ValueError(f"expected 1 <= k_best and k_min <= k_best, got {self.k_best} and {self.policy.k_min}")
        if self.on_shortfall not in ("skip", "raise"):
            raise ValueError(f"on_shortfall is 'skip' or 'raise', got {self.on_shortfall!r}")


class RemoteMixture:
    """One DMoE layer whose experts are remote. Holds no parameters and no state of a step.

    Args:
      expert: specification of the experts; only its input and output shapes are used here.
      router: scores and combines; see `dmoe_jax.routing.base`.
      directory: finds live experts. caller: places the calls. device: waits for XLA off the event loop.
    """

    def __init__(
        self,
        *,
        expert: Expert,
        router: Router,
        directory: ExpertDirectory,
        caller: ExpertCaller,
        device: Device,
        config: MixtureConfig,
    ) -> None:
        self._expert = expert
        self._router = router
        self._directory = directory
        self._caller = caller
        self._device = device
        self._config = config

    async def __call__(
        self, run: Recording, scores: Scores | tuple[Value, ...], *inputs: Value | Any
    ) -> tuple[Value, Value]:
        """Mix the experts' outputs for a batch of samples.

        Args:
          run: the step's recording.
          scores: the router's, see `dmoe_jax.routing.base.score`, on the tape.
          inputs: the experts' inputs, each [batch, ...]; the first is what a sample without experts returns.
        Returns: (mixed [batch, ...], the router's auxiliary loss, a scalar).
        Raises:
          NoQuorum: with `on_shortfall="raise"`, when some sample has fewer than `k_min` answers.
          RouterError: the router's scores are not numbers, or it selected no expert that exists.
        """
        taped: Any = scores if isinstance(scores, Scores) else Scores(cast(Any, scores))
        on_host: Scores = await to_host(self._device, jax.tree.map(lambda value: value.value, taped))
        check_finite(self._router, cast(Any, on_host.logits), self._config.prefix)
        indices, calls, slots = await self._choose(on_host)
        layer_call = _LayerCall(self, calls, slots, num_slots=indices.shape[1])
        outputs = await run.call(layer_call, *inputs)
        return run(mix_segment(self._router), taped, indices, layer_call.answered, outputs, inputs[0])

    async def _choose(self, scores: Scores) -> tuple[Array, list[ExpertCall], list[Array]]:
        """Chosen experts of each sample as [batch, slots, dims] indices, and the calls that serve them.

        `slots[c]` says in which of a sample's places call c stands, for each of the call's rows.
        """
        if self._router.whole_grid:
            return await self._choose_from_all(scores)
        batch, k = scores.logits[0].shape[0], self._config.k_best
        found = await self._directory.beam_search(self._config.prefix, cast(Any, scores.logits), k)
        indices = np.zeros((batch, k, len(self._router.grid_size)), np.int32)
        places = []
        for row, choices in enumerate(found):
            for slot, choice in enumerate(choices):
                indices[row, slot] = choice.uid.coordinates
                places.append((row, slot, choice.uid, choice.contact))
        return indices, *_grouped(places)

    async def _choose_from_all(self, scores: Scores) -> tuple[Array, list[ExpertCall], list[Array]]:
        """The same by `router.select` over all living experts, for routers that must see them all."""
        router, prefix = self._router, self._config.prefix
        contacts = await self._directory.living(prefix, router.grid_size)
        alive = np.zeros(router.grid_size, bool)
        for coordinates in contacts:
            alive[coordinates] = True
        chosen = await self._device.run(select_program(router, self._config.k_best), scores, alive)
        indices, mask = await to_host(self._device, chosen)
        places = []
        for row, slot in np.argwhere(mask).tolist():
            coordinates = tuple(indices[row, slot].tolist())
            if coordinates not in contacts:
                raise RouterError(f"router {router.name!r}: selected {coordinates} of {prefix}, which is not alive")
            places.append((row, slot, ExpertUid(prefix, coordinates), contacts[coordinates]))
        return indices, *_grouped(places)


def _grouped(places: Iterable[tuple[int, int, ExpertUid, Contact]]) -> tuple[list[ExpertCall], list[Array]]:
    """One call for each distinct expert of (row, slot, uid, contact), and the slots of each call's rows."""
    members: dict[tuple[str, Contact], list[tuple[int, int]]] = {}
    for row, slot, uid, contact in places:
        members.setdefault((format_uid(uid), contact), []).append((row, slot))
    calls = [
        ExpertCall(uid=uid, contact=contact, rows=np.array([row for row, _ in pairs]))
        for (uid, contact), pairs in members.items()
    ]
    return calls, [np.array([slot for _, slot in pairs]) for pairs in members.values()]


class _LayerCall:
    """The remote call of one layer in one step: forward to the chosen experts, backward to those that answered."""

    def __init__(self, mixture: RemoteMixture, calls: list[ExpertCall], slots: list[Array], *, num_slots: int) -> None:
        self._mixture = mixture
        self._calls = calls
        self._slots = slots
        self._num_slots = num_slots
        self.answered: Array = np.zeros((0, num_slots), bool)
        """bool [batch, slots]: which of a sample's experts answered; set by forward."""

    async def forward(self, *inputs: Any) -> tuple[Array, Any]:
        """Outputs [batch, slots, ...], zeros where nobody answered."""
        mixture, spec = self._mixture, self._mixture._expert.output
        host = await to_host(mixture._device, inputs)
        batch = host[0].shape[0]
        tensors = [[array[call.rows] for array in host] for call in self._calls]
        replies = await mixture._caller.fan_out(
            "expert.forward",
            self._calls,
            tensors,
            reply_shapes=[spec.shape],
            dtype=spec.dtype,
            num_samples=batch,
            policy=mixture._config.policy,
        )
        outputs = np.zeros((batch, self._num_slots, *spec.shape), spec.dtype)
        self.answered = np.zeros((batch, self._num_slots), bool)
        for call, slots, reply in zip(self._calls, self._slots, replies, strict=True):
            if reply is not None:
                outputs[call.rows, slots] = reply.tensors[0]
                self.answered[call.rows, slots] = True
        self._check_shortfall()
        return outputs, (tensors, replies)

    async def backward(self, residual: Any, output_grads: Any) -> tuple[Any, ...]:
        """Send the gradients to the experts that answered; sum what comes back. A lost expert counts as a constant."""
        mixture = self._mixture
        tensors, replies = residual
        grads = await to_host(mixture._device, output_grads)
        asked = [index for index, reply in enumerate(replies) if reply is not None]
        calls = [self._calls[index] for index in asked]
        messages = [
            [*tensors[index], np.ascontiguousarray(grads[self._calls[index].rows, self._slots[index]])]
            for index in asked
        ]
        specs = mixture._expert.inputs
        sums = [np.zeros((grads.shape[0], *spec.shape), spec.dtype) if spec.differentiable else None for spec in specs]
        wanted = [array for array in sums if array is not None]
        returned = await mixture._caller.fan_out(
            "expert.backward",
            calls,
            messages,
            reply_shapes=[array.shape[1:] for array in wanted],
            dtype=specs[0].dtype,
            num_samples=grads.shape[0],
            policy=mixture._config.policy,
            retry=True,
        )
        for index, reply in zip(asked, returned, strict=True):
            if reply is not None:
                call = self._calls[index]
                for array, grad in zip(wanted, reply.tensors, strict=True):
                    array[call.rows] += grad
                self._note(call, replies[index], reply)
        return tuple(sums)

    def _check_shortfall(self) -> None:
        config, statistics = self._mixture._config, self._mixture._caller.statistics
        answers = self.answered.sum(axis=1)
        short = np.flatnonzero(answers < config.policy.k_min)
        if short.size and config.on_shortfall == "raise":
            raise NoQuorum(
                f"layer {config.prefix!r}: {short.size} of {len(answers)} samples got fewer than "
                f"k_min={config.policy.k_min} answers from experts"
            )
        statistics.skipped_samples += int((answers == 0).sum())

    def _note(self, call: ExpertCall, forward_reply: Reply, backward_reply: Reply) -> None:
        statistics = self._mixture._caller.statistics
        statistics.load[call.uid] = statistics.load.get(call.uid, 0) + len(call.rows)
        before, after = forward_reply.body.get("updates"), backward_reply.body.get("updates")
        if isinstance(before, int) and isinstance(after, int):
            # Our own update is not staleness; an expert that does not learn, or was restarted, shows none.
            statistics.staleness_total += max(0, after - before - 1)
            statistics.staleness_calls += 1


@functools.cache
def mix_segment(router: Router) -> Any:
    """The segment (scores, indices, answered, outputs, x) -> (mixed, aux_loss) for this router, made once.

    mixed[b] = x[b] + sum_k weights[b, k] (outputs[b, k] - x[b]), weights = router.combine(logits, answered); where
    nobody answered, mixed[b] = x[b].
    """

    def mix(scores: Scores, indices: Any, answered: Any, outputs: Any, x: Any) -> tuple[Any, Any]:
        weights = router.combine(gather_logits(scores, indices, router.grid_size), answered)
        return combine_outputs(weights, answered, outputs, x), router.aux_loss(scores, indices, answered)

    return mix


@functools.cache
def select_program(router: Router, k: int) -> Any:
    """The compiled (scores, alive) -> (indices, mask) of this router, made once."""

    def select(scores: Scores, alive: Any) -> tuple[Any, Any]:
        return router.select(scores, k, alive)

    return jax.jit(select)
