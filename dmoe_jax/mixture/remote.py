"""The mixture over the network: the same mathematics as `mixture.local`, with experts on other machines.

One layer of one step:

    scores  = router.scores(gate, features)                      jitted segment of the model
    choices = beam search for the k_best live experts, or        DHT, cached
              router.select over all that are alive
    outputs = one call per distinct expert, not per sample       network, k_min and grace
    mixed   = x + sum_k weights_k (outputs_k - x), weights of those that answered       jitted segment

Learning@home section 3.1 and 3.3; hivemind sends one request per (sample, expert) pair instead. An expert that does
not answer is masked and the weights renormalised over the others; in the backward pass an expert that is lost is a
constant: it passes no gradient to its inputs. A sample without any expert goes through unchanged where an expert's
output has the shape and dtype of its first input (experts then carry their own residual connection), and gives zeros
elsewhere; no row is ever NaN, and a layer that finds no experts says so.

`RemoteMixture` comes in two forms: called on the tape of `dmoe_jax.autodiff`, or part by part (`choose`, `forward`,
`backward`) with arrays on the host, from which `dmoe_jax.flax_layers` makes a layer that lives under `jit`.
"""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import numpy as np

from dmoe_jax.autodiff import Recording, Value
from dmoe_jax.device import Device, to_host
from dmoe_jax.directory import ExpertDirectory
from dmoe_jax.experts.base import Expert
from dmoe_jax.grid import ExpertUid
from dmoe_jax.mixture.choice import Choice, grouped, select_program
from dmoe_jax.mixture.coverage import Coverage
from dmoe_jax.mixture.fan_out import CallPolicy, ExpertCall, ExpertCaller
from dmoe_jax.mixture.local import combine_outputs
from dmoe_jax.mixture.readiness import check_experts
from dmoe_jax.mixture.statistics import CallStatistics
from dmoe_jax.routing.base import Router, RouterError, Scores, gather_logits
from dmoe_jax.routing.check import check_finite
from net.errors import NoQuorum
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
    max_skipped: float = 1.0
    """Largest share of samples without any expert, over the layer's last 32 calls; beyond it a call raises
    `TooFewExperts`. 1: never, the layer only warns."""

    def __post_init__(self) -> None:
        if self.k_best < 1 or self.policy.k_min > self.k_best:
            raise ValueError(f"expected 1 <= k_best and k_min <= k_best, got {self.k_best} and {self.policy.k_min}")
        if self.on_shortfall not in ("skip", "raise"):
            raise ValueError(f"on_shortfall is 'skip' or 'raise', got {self.on_shortfall!r}")
        if not 0 <= self.max_skipped <= 1:
            raise ValueError(f"max_skipped is a share from 0 to 1, got {self.max_skipped}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """What a backward pass needs of its forward pass.

    Attributes:
      choice: where the batch went.
      tensors: the inputs of each call; None for a call that was not answered.
      updates: how many updates each expert had taken, as it said.
      body: what its calls said beside their experts; the backward pass says the same.
    """

    choice: Choice
    tensors: tuple[list[Array] | None, ...]
    updates: tuple[Any, ...]
    body: dict[str, Any]


class RemoteMixture:
    """One DMoE layer whose experts are remote. Holds no parameters and no state of a step.

    Args:
      expert: specification of the experts; only its input and output shapes are used here.
      router: scores and combines; see `dmoe_jax.routing.base`.
      directory: finds live experts. caller: places the calls. device: waits for XLA off the event loop.
      seed: of the dropout in experts that take a key; with the layer's prefix it decides what each call draws.
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
        seed: int = 0,
    ) -> None:
        self._expert = expert
        self._router = router
        self._directory = directory
        self._caller = caller
        self._device = device
        self._config = config
        self._rng = random.Random(f"{seed} {config.prefix}")
        instead = "pass unchanged" if expert.is_residual else "give zeros"
        self._coverage = Coverage(config.prefix, max_skipped=config.max_skipped, instead=f"such samples {instead}")

    @property
    def expert(self) -> Expert:
        """The network of every expert."""
        return self._expert

    @property
    def router(self) -> Router:
        """The router."""
        return self._router

    @property
    def config(self) -> MixtureConfig:
        """The settings."""
        return self._config

    @property
    def statistics(self) -> CallStatistics:
        """Totals of the expert calls of all mixtures that share this one's caller."""
        return self._caller.statistics

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
          TooFewExperts: too many samples have none at all, see `MixtureConfig.max_skipped`.
          RouterError: the router's scores are not numbers, or it selected no expert that exists.
        """
        taped: Any = scores if isinstance(scores, Scores) else Scores(cast(Any, scores))
        on_host: Scores = await to_host(self._device, jax.tree.map(lambda value: value.value, taped))
        choice = await self.choose(on_host)
        layer_call = _LayerCall(self, self._device, choice, self.dropout_seed() if run.differentiates else None)
        outputs = await run.call(layer_call, *inputs)
        return run(mix_segment(self._router), taped, choice.indices, layer_call.answered, outputs, inputs[0])

    def dropout_seed(self) -> int | None:
        """The seed of the next training call's dropout, 63 bits; None for experts that take no key."""
        return self._rng.getrandbits(63) if self._expert.takes_key else None

    async def alive(self) -> Array:
        """Which experts are alive: bool, of the grid's shape."""
        alive = np.zeros(self._router.grid_size, bool)
        for coordinates in await self._directory.living(self._config.prefix, self._router.grid_size):
            alive[coordinates] = True
        return alive

    async def choose(self, scores: Scores) -> Choice:
        """The experts of each sample, by beam search through the directory, or for routers that must see the whole grid
        by `router.select` over all that are alive.

        Args:
          scores: the router's, arrays on the host.
        Raises:
          RouterError: as `__call__`.
        """
        router, k = self._router, self._config.k_best
        check_finite(router, cast(Any, scores.logits), self._config.prefix)
        if router.whole_grid:
            alive = await self.alive()
            chosen = await self._device.run(select_program(router, k), scores, alive)
            indices, mask = await to_host(self._device, chosen)
            return await self.choose_selected(indices, mask, alive)
        found = await self._directory.beam_search(self._config.prefix, cast(Any, scores.logits), k)
        indices = np.zeros((len(found), k, len(router.grid_size)), np.int32)
        places = []
        for row, choices in enumerate(found):
            for slot, choice in enumerate(choices):
                indices[row, slot] = choice.uid.coordinates
                places.append((row, slot, choice.uid, choice.contact))
        return grouped(indices, places)

    async def choose_selected(self, indices: Array, mask: Array, alive: Array) -> Choice:
        """The experts that `router.select` chose among those of `alive`; who has died since is left out.

        Raises:
          RouterError: some of them were not alive.
        """
        prefix = self._config.prefix
        contacts = await self._directory.living(prefix, self._router.grid_size)
        places = []
        for row, slot in np.argwhere(mask).tolist():
            coordinates = tuple(indices[row, slot].tolist())
            if not alive[coordinates]:
                raise RouterError(
                    f"router {self._router.name!r}: selected {coordinates} of {prefix}, which is not alive"
                )
            if coordinates in contacts:
                places.append((row, slot, ExpertUid(prefix, coordinates), contacts[coordinates]))
        return grouped(np.asarray(indices, np.int32), places)

    async def forward(
        self, choice: Choice, inputs: Sequence[Array], dropout_seed: int | None = None
    ) -> tuple[Array, Array, Residual]:
        """Ask the chosen experts.

        Args:
          choice: from `choose`.
          inputs: the experts' inputs, arrays on the host, [batch, ...].
          dropout_seed: in training, from `dropout_seed`; None: nothing is random.
        Returns: (outputs [batch, slots, ...], zeros where nobody answered; answered, bool [batch, slots]; what
          `backward` needs).
        Raises:
          NoQuorum, TooFewExperts: as `__call__`.
        """
        spec, batch = self._expert.output, len(inputs[0])
        tensors = [[array[call.rows] for array in inputs] for call in choice.calls]
        body = {} if dropout_seed is None else {"dropout_seed": dropout_seed}
        policy = self._config.policy
        replies = await self._caller.fan_out(
            "expert.forward", choice.calls, tensors, replies=[spec], num_samples=batch, policy=policy, body=body
        )
        outputs = np.zeros((*choice.indices.shape[:2], *spec.shape), spec.dtype)
        answered = np.zeros(choice.indices.shape[:2], bool)
        for call, slots, reply in zip(choice.calls, choice.slots, replies, strict=True):
            if reply is not None:
                outputs[call.rows, slots] = reply.tensors[0]
                answered[call.rows, slots] = True
        self._note_answers(answered, found=len(replies), lost=replies.count(None))
        residual = Residual(
            choice=choice,
            tensors=tuple(sent if reply else None for sent, reply in zip(tensors, replies, strict=True)),
            updates=tuple(reply and reply.body.get("updates") for reply in replies),
            body=body,
        )
        return outputs, answered, residual

    async def backward(self, residual: Residual, output_grads: Array) -> tuple[Array | None, ...]:
        """Send the outputs' gradients to the experts that answered, which learn from them; sum what comes back.

        An expert that does not answer any more counts as a constant. Returns one array [batch, ...] for each
        differentiable input, None for the others.
        """
        choice, specs = residual.choice, self._expert.inputs
        asked = [index for index, tensors in enumerate(residual.tensors) if tensors is not None]
        messages = [
            [
                *cast(list[Array], residual.tensors[index]),
                np.ascontiguousarray(output_grads[choice.calls[index].rows, choice.slots[index]]),
            ]
            for index in asked
        ]
        batch = len(output_grads)
        sums = [np.zeros((batch, *spec.shape), spec.dtype) if spec.differentiable else None for spec in specs]
        returned = await self._caller.fan_out(
            "expert.backward",
            [choice.calls[index] for index in asked],
            messages,
            replies=[spec for spec in specs if spec.differentiable],
            num_samples=batch,
            policy=self._config.policy,
            body=residual.body,
            retry=True,
        )
        for index, reply in zip(asked, returned, strict=True):
            if reply is not None:
                wanted = (array for array in sums if array is not None)
                for array, grad in zip(wanted, reply.tensors, strict=True):
                    _add_rows(array, choice.calls[index].rows, cast(Array, grad))
                self._note_update(choice.calls[index], residual.updates[index], reply.body.get("updates"))
        return tuple(sums)

    async def check(self, *, timeout_s: float = 60.0, say: Callable[[str], None] = lambda _: None) -> int:
        """Wait until the layer has an expert that answers, and make sure that it is of our kind.

        Args:
          timeout_s: longest wait, seconds.
          say: is told once a second what is waited for, and at the end how many experts are alive.
        Returns: how many experts are alive.
        Raises:
          NoQuorum: there is none; the message says which prefixes this swarm serves.
          ExpertMismatch: its tensors have other shapes or types; a ValueError.
        """
        return await check_experts(
            self._expert,
            self._config.prefix,
            self._router.grid_size,
            directory=self._directory,
            caller=self._caller,
            timeout_s=timeout_s,
            say=say,
        )

    def _note_answers(self, answered: Array, *, found: int, lost: int) -> None:
        config, answers = self._config, answered.sum(axis=1)
        skipped = int((answers == 0).sum())
        self.statistics.skipped_samples += skipped
        self._coverage.note(skipped, len(answers), found=found, answered=found - lost)
        short = np.flatnonzero(answers < config.policy.k_min)
        if short.size and config.on_shortfall == "raise":
            raise NoQuorum(
                f"layer {config.prefix!r}: {short.size} of {len(answers)} samples got fewer than "
                f"k_min={config.policy.k_min} answers from experts"
            )

    def _note_update(self, call: ExpertCall, before: Any, after: Any) -> None:
        statistics = self.statistics
        statistics.load[call.uid] = statistics.load.get(call.uid, 0) + len(call.rows)
        if isinstance(before, int) and isinstance(after, int):
            # Our own update is not staleness; an expert that does not learn, or was restarted, shows none.
            statistics.staleness_total += max(0, after - before - 1)
            statistics.staleness_calls += 1


class _LayerCall:
    """The remote call of one layer in one step, for the tape."""

    def __init__(self, mixture: RemoteMixture, device: Device, choice: Choice, dropout_seed: int | None) -> None:
        self._mixture = mixture
        self._device = device
        self._choice = choice
        self._dropout_seed = dropout_seed
        self.answered: Array = np.zeros((0, 0), bool)
        """bool [batch, slots]: which of a sample's experts answered; set by forward."""

    async def forward(self, *inputs: Any) -> tuple[Array, Residual]:
        host = await to_host(self._device, inputs)
        outputs, self.answered, residual = await self._mixture.forward(self._choice, host, self._dropout_seed)
        return outputs, residual

    async def backward(self, residual: Residual, output_grads: Any) -> tuple[Any, ...]:
        return await self._mixture.backward(residual, await to_host(self._device, output_grads))


def _add_rows(array: Array, rows: Array, grads: Array) -> None:
    """Add each gradient to its row."""
    if len(np.unique(rows)) == len(rows):
        array[rows] += grads
    else:  # a router that selects an expert twice for a sample: += would keep one gradient of the two
        np.add.at(array, rows, grads)


@functools.cache
def mix_segment(router: Router) -> Any:
    """The segment (scores, indices, answered, outputs, x) -> (mixed, aux_loss) for this router, made once.

    The mixture is that of `combine_outputs`, with weights = router.combine(logits, answered).
    """

    def mix(scores: Scores, indices: Any, answered: Any, outputs: Any, x: Any) -> tuple[Any, Any]:
        weights = router.combine(gather_logits(scores, indices, router.grid_size), answered)
        return combine_outputs(weights, answered, outputs, x), router.aux_loss(scores, indices, answered)

    return mix
