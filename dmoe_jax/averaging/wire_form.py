"""The form in which a fragment of an optimiser's state travels: all its numbers, some of them, or the largest.

`moshpit_average(compress=...)` sends the largest of each block with error feedback (SparseLoCo): `optim.compression`
chooses and rounds, `dmoe_net.averaging.gathering` exchanges, and the mean of all payloads comes back to the optimiser.
What was not sent stays in its state, and so in checkpoints. What a lost round offered is offered again.
"""

from dataclasses import dataclass

import jax
import numpy as np
import optax

from dmoe_jax.arrays import PyTree
from dmoe_jax.averaging.settings import TreeAveragerConfig
from dmoe_jax.mesh.shards import tree_spans_processes
from dmoe_jax.optim.compression import sparse_vector
from dmoe_jax.optim.host_state import HostState, Sent, awaiting_host
from dmoe_jax.optim.tree_vectors import TreeLayout
from dmoe_net.averaging.gathering import SparseLayout
from dmoe_net.types import Array
from dmoe_net.wire.sparse import SparseVector


@dataclass(frozen=True, slots=True, kw_only=True)
class WireForm:
    """The form of one fragment."""

    layout: TreeLayout
    """Layout of the vector that the peer offers."""
    mean: TreeLayout
    """Layout of the mean that comes back. For sparse payloads it is float32 whatever the parameters are: fewer bits
    would not be what was taken off the residual."""
    sparse: SparseLayout | None
    """Layout of sparse payloads; None: all numbers travel, or the config's share of them."""

    def vector_of(self, sent: Sent) -> tuple[Array | SparseVector, bool]:
        """Return the vector that travels, on the host, and True if all of it is finite."""
        if self.sparse is None:
            whole = self.layout.to_vector(sent.tree)
            return whole, bool(np.isfinite(whole).all())
        assert sent.parts is not None
        vector = sparse_vector(sent.parts, sent.tree, self.sparse.coding)
        return vector, all(bool(np.isfinite(part.scales).all()) for part in vector.parts)


def wire_forms(
    optimizer: optax.GradientTransformation, params: PyTree, config: TreeAveragerConfig
) -> tuple[str, list[WireForm]]:
    """Return the kind of what the optimiser averages, and the form of each fragment that it offers.

    Raises:
      ValueError: the optimiser does not average by the host, the config says something else of the method, or a
        parameter is not of floating-point numbers.
    """
    state = awaiting_host(jax.eval_shape(optimizer.init, params))
    _check_method(state, config)
    count, feedback = state.due.size, state.feedback

    def offers(params: PyTree) -> list[tuple[PyTree, PyTree]]:
        state = awaiting_host(optimizer.init(params))
        return [(sent.uncompressed, sent.tree) for sent in (state.offer(params, number) for number in range(count))]

    # Of a model over several processes the offers are made once, for they say where their arrays lie.
    spans = tree_spans_processes(params)
    if spans and feedback is not None:
        raise ValueError(
            "compress is for a model on one process: the largest numbers are chosen from blocks of whole arrays, which "
            "no process of this model has"
        )
    forms = []
    for offered, sent in offers(params) if spans else jax.eval_shape(offers, params):
        layout = mean = TreeLayout(offered)
        sparse = None
        if feedback is not None:
            mean = TreeLayout(sent)
            sizes = tuple(leaf.size for leaf in jax.tree.leaves(sent))
            sparse = SparseLayout(coding=feedback.coding, sizes=sizes)
        forms.append(WireForm(layout=layout, mean=mean, sparse=sparse))
    return state.kind, forms


def _check_method(state: HostState, config: TreeAveragerConfig) -> None:
    """Refuse what the settings say of the method where it does not fit the optimiser."""
    feedback = state.feedback
    if feedback is None and config.sparse is not None:
        raise ValueError(
            "sparse payloads need the error feedback: make the optimiser with moshpit_average(compress=...)"
        )
    if config.sparse is not None and config.sparse != feedback:
        raise ValueError("the optimiser was made with `compress`: give the same to the averager's config as `sparse`")
    if config.share < 1 and state.kind != "parameters":
        raise ValueError(
            f"a share of {config.share} is for an optimiser that averages parameters, this one: {state.kind}"
        )
    if feedback is not None and config.compression != "none":
        raise ValueError(
            f"sparse values travel in a few bits as they are: compression {config.compression!r} is for all"
        )
