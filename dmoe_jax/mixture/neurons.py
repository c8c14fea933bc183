"""The PEER layer at its own scale: 10^5 experts or more, of one hidden unit each (He 2024, sections 2.1 and 2.2).

    for each head h:  q_h = query_h(x), its k best experts I_h by product keys that all heads share
    y = x + sum_h sum_{i in I_h} softmax(q_h^T k_i) gelu(<down_i, x>) up_i

Nothing of the size [batch, experts] exists: `routing.base.best_sums` finds the k best of 320 x 320 experts among
k + k coordinates, and the chosen experts' two vectors are looked up like rows of an embedding. Over a network the same
experts are found by beam search: a `RemoteMixture` takes the scores of `score_heads` as those of any batch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.experts.neuron import neuron
from dmoe_jax.mixture.local import init_experts
from dmoe_jax.routing.base import Router, cell_numbers, combine_weights
from dmoe_jax.routing.peer import init_heads, score_heads


def init_peer_layer(key: PRNGKeyArray, router: Router, d_model: int, *, heads: int, prefix: str = "peer") -> PyTree:
    """Parameters of the layer: {"router": ..., "experts": stacked neurons, [num_experts, ...]}.

    Args:
      router: of `dmoe_jax.routing.peer`; its grid has the experts.
      d_model: width of the hidden states.
      heads: queries for each sample; 8 in the paper.
      prefix: the name of the grid: a node that serves `prefix.i.j` with the expert key starts from the same expert.
    """
    router_key, expert_key = jax.random.split(key)
    return {
        "router": init_heads(router, router_key, d_model, heads=heads),
        "experts": init_experts(expert_key, neuron(d_model=d_model), prefix, router.grid_size),
    }


def peer_layer(params: PyTree, router: Router, x: Float[Array, "batch d_model"], k: int) -> Array:
    """The layer's output, [batch, d_model]: x, and what k experts of each head add to it.

    Args:
      params: of `init_peer_layer`.
      router: static under jit, as is k, the experts for each head; 16 in the paper.
      x: hidden states; several sequences come as rows.
    """
    scores = score_heads(router, params["router"], x)
    indices, mask = router.select(scores, k)
    weights = combine_weights(router, scores, indices, mask)
    heads = indices.shape[0] // x.shape[0]
    rows = jnp.tile(x, (heads, 1))
    mixed = neuron_mixture(params["experts"], router.grid_size, indices, mask, weights, rows)
    return x + jnp.sum((mixed - rows).reshape(heads, *x.shape), axis=0)


def neuron_mixture(
    params: PyTree,
    grid_size: tuple[int, ...],
    indices: Int[Array, "batch k dims"],
    mask: Bool[Array, "batch k"],
    weights: Float[Array, "batch k"],
    x: Float[Array, "batch d_model"],
) -> Float[Array, "batch d_model"]:
    """`local_mixture` for neurons, by products over looked-up vectors instead of a call for each expert.

    Args:
      params: stacked parameters of `dmoe_jax.experts.neuron`.
      grid_size, indices, mask, weights: see `local_mixture`.
      x: the neurons' input.
    """
    chosen = cell_numbers(indices, grid_size)
    # What stands in a masked neuron has no influence, be it infinite: not on a gradient either.
    down, up = (jnp.where(mask[..., None], params[name][chosen], 0) for name in ("down", "up"))
    hidden = jax.nn.gelu(jnp.einsum("bkd,bd->bk", down, x)) * weights
    return x + jnp.einsum("bk,bkd->bd", hidden, up)
