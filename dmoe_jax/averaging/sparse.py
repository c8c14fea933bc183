"""What a peer offers where few numbers travel: the largest of each block, with error feedback (SparseLoCo).

`optim.compression` chooses and rounds, `net.averaging.gathering` exchanges, and the mean of all payloads comes back to
the optimiser. What was not sent stays in the optimiser's state, and with it in checkpoints. A round that is lost
changes nothing there: what it offered is offered again, and was applied by nobody here.
"""

from dataclasses import dataclass

import jax
import numpy as np

from dmoe_jax.optim.compression import ErrorFeedback, sparse_vector
from dmoe_jax.optim.hosting import host_state
from dmoe_jax.optim.moshpit_state import MoshpitState, Sent
from dmoe_jax.optim.tree_vectors import TreeLayout
from dmoe_jax.types import PyTree
from net.averaging.gathering.sparse_mean import SparseLayout
from net.wire.sparse import SparseVector


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOffers:
    """How trees become payloads, and means become trees."""

    feedback: ErrorFeedback
    """How they are compressed."""
    payload: SparseLayout
    """What the payloads are of."""
    layout: TreeLayout
    """Of the mean, float32 whatever the parameters are: rounded to fewer bits it would not be what was taken off the
    residual."""

    def vector_of(self, sent: Sent) -> tuple[SparseVector, bool]:
        """What travels, on the host, and whether all of it is finite."""
        assert sent.parts is not None
        vector = sparse_vector(sent.parts, sent.tree, self.feedback.coding)
        is_finite = all(bool(np.isfinite(part.scales).all()) for part in vector.parts)
        return vector, is_finite


def sparse_offers(opt_state: PyTree, feedback: ErrorFeedback | None) -> SparseOffers | None:
    """The sparse form in which changes of what is averaged travel; None if they travel whole.

    Args:
      opt_state: of an optimiser that averages, or its shapes.
      feedback: as the averager's settings have it.

    Raises:
      ValueError: the optimiser keeps a residual and the settings say nothing of it, or the other way round.
    """
    state = host_state(opt_state)
    residual = state.residual if isinstance(state, MoshpitState) else None
    if feedback is None:
        if residual is not None:
            raise ValueError(
                "the optimiser was made with `compress`: give the same to the averager's config as `sparse`"
            )
        return None
    if residual is None:
        raise ValueError(
            "sparse payloads need the error feedback: make the optimiser with moshpit_average(compress=...)"
        )
    residual = jax.eval_shape(lambda kept: kept, residual)  # of what is averaged, under `optax.masked` a part
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(residual))
    payload = SparseLayout(coding=feedback.coding, sizes=sizes)
    return SparseOffers(feedback=feedback, payload=payload, layout=TreeLayout(residual))
