"""Experts outlive their nodes: nodes claim experts that nobody serves, and take them up.

Theory of operation. A claimer reads, again and again, who announces the experts of its patterns, and probes the nodes
that do. An expert that nobody announces, or whose node does not answer any more, is *vacant*. The claimer chooses
some of the vacant ones (`sharing`), writes a claim for each into the DHT, lets the claims settle, and reads them again.
If nobody has a better one it confirms its claim, takes the expert up (from its checkpoint, else from its seed; one with
a living replica is not vacant) and serves it (`claiming`, pure; `claimer`, the shell). If two nodes serve one expert
all the same, because a partition has healed or a slow node was taken for dead, one of them gives it up (`contest`).

Why two claimers do not win one claim. Suppose that reads see what was written before they began. Each claimer reads
only after `settle_s` from the end of its own write, and confirms within `settle_s` from the beginning of that read, or
else settles once more. Of two claimers that know of each other the better one wins, by the same rule on both sides. If
the first to read misses the other's claim, then that claim was written later, so that the other reads `settle_s` later
still, and finds the first one's confirmed: a confirmed claim beats every other. Where the DHT does not keep its
promise, as while a partition heals, the rule for two nodes that serve one expert comes after it.
"""
