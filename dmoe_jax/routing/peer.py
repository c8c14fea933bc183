"""Product keys with a query network, as in PEER (He 2024, section 2) and product-key memory (Lample et al. 2019).

    q = query(x), one part q_i for each dimension of the grid
    g(x, f) = sum_i <q_i, sub_key_i[u_i]>       eq. 4, 5; softmax over the top k, eq. 1-3

Unlike `product_key`, where every dimension sees the whole input, a dimension scores its own part of the query. The
papers normalise queries over the batch, which evens out the use of experts; trainers with batches of one sample have
no such statistics, so each part is normalised for itself, to mean 0 and variance 1 over its features. That, too, keeps
a score from growing without bound.

One head is enough for experts that are whole networks. For experts of a single neuron the paper has several, each with
a query network of its own over the same keys: `init_heads` and `score_heads`, where every head of every sample is a row
that is routed by itself (`dmoe_jax.mixture.neurons` is the layer).
"""

import math

import jax
from jaxtyping import PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.checks import check_positive
from dmoe_jax.routing.base import Features, Ids, Router, Scores, layer_norm, router_factory, score, top_k_router


@router_factory
def peer(grid_size: tuple[int, ...], *, part_dim: int = 64) -> Router:
    """The PEER router.

    Args:
      grid_size: extent of each dimension of the expert grid.
      part_dim: features of the query's part for one dimension, at least 2: normalising one would leave 0.

    Raises:
      ValueError: if grid_size is not one or more positive integers, or part_dim is below 2.
    """
    if part_dim < 2:
        raise ValueError(f"part_dim must be at least 2, got {part_dim!r}")
    query_dim = len(grid_size) * part_dim
    bound = 1 / math.sqrt(part_dim)  # of sub-keys, as in product-key memory: a score then has a deviation of 0.58

    def init(key: PRNGKeyArray, d_model: int) -> PyTree:
        query_key, *sub_keys = jax.random.split(key, 1 + len(grid_size))
        return {
            "query": jax.random.normal(query_key, (d_model, query_dim)) / math.sqrt(d_model),
            "sub_keys": [
                jax.random.uniform(sub_key, (size, part_dim), minval=-bound, maxval=bound)
                for sub_key, size in zip(sub_keys, grid_size, strict=True)
            ],
        }

    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Scores:
        del key, ids
        query = layer_norm((x @ params["query"]).reshape(x.shape[0], len(grid_size), part_dim))
        return Scores(tuple(query[:, dim] @ keys.T for dim, keys in enumerate(params["sub_keys"])))

    return top_k_router("peer", grid_size, init, scores)


def init_heads(router: Router, key: PRNGKeyArray, d_model: int, *, heads: int) -> PyTree:
    """Parameters of a `peer` router with several heads: a query network for each, and the sub-keys that they share.
    Raises ValueError if heads is not a positive integer, or the router is another one."""
    check_positive(heads=heads)
    if router.name != "peer":
        raise ValueError(f"heads share the sub-keys of a router of `peer`, got {router.name!r}")
    own = jax.vmap(lambda key: router.init(key, d_model))(jax.random.split(key, heads))
    return {"query": own["query"], "sub_keys": [keys[0] for keys in own["sub_keys"]]}


def score_heads(router: Router, params: PyTree, x: Features) -> Scores:
    """The scores of each head and sample: [heads * batch, grid_i] for each dimension, head by head.

    What serves such a row is a mixture like any other: give it `jnp.tile(x, (heads, 1))`, and add up over the heads
    what it has added to x.
    """

    def one(query: PyTree) -> Scores:
        return score(router, {"query": query, "sub_keys": params["sub_keys"]}, x)

    by_head = jax.vmap(one)(params["query"])
    return jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), by_head)
