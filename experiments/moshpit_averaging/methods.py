"""Methods that Moshpit is compared with, a round at a time: gossip on a ring, PushSum, random groups.

Values are [peers] and `alive` is bool [peers]; absent peers keep their own values. Every function may be traced, also
under `vmap` over many swarms.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.optim import FailureRule, group_mean


def gossip_round(values: Array, alive: Array) -> Array:
    """Everybody on a ring gets the mean of itself and those of its two neighbours who are there."""
    shifts, present = (-1, 0, 1), alive.astype(values.dtype)
    total = sum(jnp.roll(jnp.where(alive, values, 0), shift) for shift in shifts)
    count = sum(jnp.roll(present, shift) for shift in shifts)
    return jnp.where(alive, total / jnp.maximum(count, 1), values)


def push_sum_round(values: Array, weights: Array, alive: Array, round_number: ArrayLike) -> tuple[Array, Array]:
    """PushSum (Kempe et al., 2003) over an exponential graph, as in SGP: peer i sends to i + 2^h and i + 2^(h + 1).

    A peer cuts the pair (weight x value, weight) into equal shares for itself and for those of the two who are there.
    So the sums of both over all peers never change; a peer's value is the quotient of what it then holds. h goes from
    round to round through 0 to floor(log2(peers - 1)) - 1. Weights are 1 at the beginning.
    """
    hop = 2 ** (jnp.asarray(round_number) % _hops(len(values)))
    shifts, present = (0, hop, 2 * hop), alive.astype(values.dtype)
    sent = weights * present / jnp.maximum(sum(jnp.roll(present, -shift) for shift in shifts), 1)
    new_weights = jnp.where(alive, sum(jnp.roll(sent, shift) for shift in shifts), weights)
    total = sum(jnp.roll(jnp.where(alive, values, 0) * sent, shift) for shift in shifts)
    return jnp.where(alive, total / new_weights, values), new_weights


def published_push_sum_round(values: Array, alive: Array, round_number: ArrayLike) -> Array:
    """Make a round of the SGP of the paper's table: plain means of a peer's and its present in-neighbours' values.

    Peer i hears i + 2^h and i + 2^(h+1), beginning with h = 1. Its matrices shift entries along the flattened matrix,
    so that whoever would hear past the last peer hears what its predecessor should: not doubly stochastic, and other
    rounds than with a closed graph. Kept, since the table was made with it.
    """
    num_peers = len(values)
    peer = jnp.arange(num_peers)
    hop = 2 ** ((jnp.asarray(round_number) + 1) % _hops(num_peers))
    sent, present = jnp.where(alive, values, 0), alive.astype(values.dtype)
    total, count = sent, present
    for shift in (hop, 2 * hop):
        sender, hearer = (peer + shift) % num_peers, (peer + (peer + shift >= num_peers)) % num_peers
        total = total.at[hearer].add(sent[sender])
        count = count.at[hearer].add(present[sender])
    return jnp.where(alive, total / jnp.maximum(count, 1), values)


def random_groups_round(
    tree: PyTree, alive: Array, *, key: PRNGKeyArray, group_size: int, failure_rule: FailureRule = "exclude"
) -> PyTree:
    """Peers are split at random into groups of `group_size`, anew each round; those left over join one each.

    Under "exclude" only those who are there are split; under "group_skips" all are, and absent ones stop their groups.
    The leaves of the tree are [peers, ...].
    """
    num_peers = len(alive)
    is_drawn = jnp.ones(num_peers, bool) if failure_rule == "group_skips" else alive
    place = jnp.where(is_drawn, jax.random.uniform(key, (num_peers,)), 2)  # those who are not drawn come last
    count = jnp.maximum(is_drawn.sum() // group_size, 1)
    rank = jnp.arange(num_peers)
    group_of_rank = jnp.where(rank < count * group_size, rank // group_size, rank % count)
    groups = jnp.zeros(num_peers, jnp.int32).at[jnp.argsort(place)].set(group_of_rank)
    return group_mean(tree, groups, num_groups=max(num_peers // group_size, 1), alive=alive, failure_rule=failure_rule)


def _hops(num_peers: int) -> int:
    """Rounds after which the graph of PushSum begins anew: floor(log2(peers - 1)), at least 1."""
    return max(1, (num_peers - 1).bit_length() - 1)
