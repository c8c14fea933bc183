"""Methods that Moshpit is compared with, over one peer axis: All-Reduce, gossip on a ring, PushSum, random groups.

A leaf is [peers, ...] and `alive` is bool [peers]; absent peers keep their own values. Every function here is pure and
may be traced, also under `vmap` over many swarms.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.optim.peer_axis import FailureRule, count_peers, group_mean, per_peer


def all_reduce_round(tree: PyTree, *, alive: ArrayLike | None = None, weights: ArrayLike | None = None) -> PyTree:
    """Everybody gets the (weighted) mean of all; with one peer absent nobody gets anything, as in a ring."""
    groups = jnp.zeros(count_peers(tree), jnp.int32)
    return group_mean(tree, groups, num_groups=1, alive=alive, weights=weights, failure_rule="group_skips")


def gossip_round(tree: PyTree, *, alive: ArrayLike | None = None) -> PyTree:
    """Everybody on a ring gets the mean of itself and those of its two neighbours who are there."""
    present = _presence(tree, alive)
    counts = sum(jnp.roll(present, shift) for shift in (-1, 0, 1))

    def mix(leaf: Array) -> Array:
        own = per_peer(present, leaf)
        added = jnp.where(own > 0, leaf, 0)
        mean = sum(jnp.roll(added, shift, axis=0) for shift in (-1, 0, 1)) / per_peer(jnp.maximum(counts, 1), leaf)
        return jnp.where(own > 0, mean.astype(leaf.dtype), leaf)

    return jax.tree.map(mix, tree)


def push_sum_round(
    tree: PyTree, push_weights: ArrayLike, *, round_number: ArrayLike, alive: ArrayLike | None = None
) -> tuple[PyTree, Array]:
    """PushSum (Kempe et al., 2003) over an exponential graph, as in SGP: peer i sends to i + 2^h and i + 2^(h + 1).

    A peer cuts the pair (weight x value, weight) into equal shares for itself and for those of the two who are there.
    So the sums of both over all peers never change; a peer's value is the quotient of what it then holds. h goes from
    round to round through 0 to floor(log2(peers - 1)) - 1.

    Args:
      tree: leaves [peers, ...], the values.
      push_weights: float [peers], 1 for all at the beginning.
      round_number: may be traced.
      alive: who is there.

    Returns:
      The tree and the weights after the round.
    """
    present = _presence(tree, alive)
    num_peers = present.shape[0]
    hop = 2 ** (jnp.asarray(round_number) % push_sum_hops(num_peers))
    shifts = (0, hop, 2 * hop)
    share = present / jnp.maximum(sum(jnp.roll(present, -shift) for shift in shifts), 1)
    sent_weights = jnp.asarray(push_weights) * share
    received = sum(jnp.roll(sent_weights, shift) for shift in shifts)
    new_weights = jnp.where(present > 0, received, jnp.asarray(push_weights))

    def mix(leaf: Array) -> Array:
        own = per_peer(present, leaf)
        sent = jnp.where(own > 0, leaf, 0) * per_peer(sent_weights, leaf)
        mean = sum(jnp.roll(sent, shift, axis=0) for shift in shifts) / per_peer(new_weights, leaf)
        return jnp.where(own > 0, mean.astype(leaf.dtype), leaf)

    return jax.tree.map(mix, tree), new_weights


def push_sum_hops(num_peers: int) -> int:
    """Rounds after which the graph of PushSum begins anew: floor(log2(peers - 1)), at least 1."""
    return max(1, (num_peers - 1).bit_length() - 1)


def random_groups_round(
    tree: PyTree,
    *,
    key: PRNGKeyArray,
    group_size: int,
    alive: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    failure_rule: FailureRule = "exclude",
) -> PyTree:
    """Peers are split at random into groups of `group_size`, anew each round; those left over join one each.

    Under "exclude" only those who are there are split; under "group_skips" all are, and absent ones stop their groups.

    Raises:
      ValueError: the group size is below 1.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    num_peers = count_peers(tree, alive=alive, weights=weights)
    is_drawn = jnp.ones(num_peers, bool) if alive is None or failure_rule == "group_skips" else jnp.asarray(alive, bool)
    place = jnp.where(is_drawn, jax.random.uniform(key, (num_peers,)), 2)  # those who are not drawn come last
    count = jnp.maximum(is_drawn.sum() // group_size, 1)
    rank = jnp.arange(num_peers)
    group_of_rank = jnp.where(rank < count * group_size, rank // group_size, rank % count)
    groups = jnp.zeros(num_peers, jnp.int32).at[jnp.argsort(place)].set(group_of_rank)
    return group_mean(
        tree,
        groups,
        num_groups=max(num_peers // group_size, 1),
        alive=alive,
        weights=weights,
        failure_rule=failure_rule,
    )


def mixing_factor(num_peers: int, num_groups: int) -> float:
    """A round of random groups multiplies the expected distortion by (r - 1)/N + r/N^2 (Ryabinin et al., 2021).

    N peers, r groups, whatever the values are: no spectral gap of a graph enters.
    """
    return (num_groups - 1) / num_peers + num_groups / num_peers**2


def _presence(tree: PyTree, alive: ArrayLike | None) -> Array:
    """[peers]: 1.0 for those who are there, 0.0 for others."""
    num_peers = count_peers(tree, alive=alive)
    return jnp.ones(num_peers) if alive is None else jnp.asarray(alive, jnp.float32)
