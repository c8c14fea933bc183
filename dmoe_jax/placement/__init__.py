"""Experts outlive their nodes: an expert wants a number R of living holders, and the nodes see to it that it has them.

    await swarm.serve({"ffn.[0:4].[0:4]": expert}, placement=PlacementConfig(max_experts=8))                 # claim
    await swarm.serve({"ffn.[0:4].[0:4]": expert}, placement=PlacementConfig(replicas=2))                    # replicate
    await swarm.serve({"ffn.[0:4].[0:4]": expert}, placement=PlacementConfig(max_experts=8, replicas=2))     # both

Theory of operation. A node that claims reads, again and again, who announces the experts of its patterns, and probes
the nodes that do. An expert with fewer than R living holders that nobody claims is *vacant*. The node chooses some of
the vacant ones (`sharing`), writes a claim for each into the DHT, lets the claims settle, and reads them again. If the
expert still has fewer than R holders, no other claim is confirmed and none is better, the node confirms its own, takes
the expert up (from a living holder, else from its checkpoint, else from its seed) and serves it (`claiming`, pure;
`claimer`, the shell). If more than R nodes serve one expert all the same, because a partition has healed or a slow node
was taken for dead, the weakest give it up (`contest`). A node that was told to serve an expert holds it too, and never
gives it up.

Holders of one expert share its load: trainers spread over them by themselves. One that comes takes the state of one
that serves (`state`). Every `average_period_s` they are averaged, each counting as the updates that it has taken
meanwhile: after it all have learnt from all gradients. What is averaged and why is in `copies`; who averages with whom,
and in which order, in `rounds`; the shell is `averager`.

Why an expert gets no more than R holders. Suppose that reads see what was written before they began. Each claimer reads
only after `settle_s` from the end of its own write, and confirms within `settle_s` from the beginning of that read, or
else settles once more. Take two winners, of whom one read first. If it missed the other's claim, then that claim was
written later, so that the other read `settle_s` later still, and found the first one's confirmed. If both found each
other's unconfirmed, then the worse of them, by a rule that is the same on all sides, would not have won. So whoever
wins later has found all earlier winners confirmed, and therefore, since it won, serving: fewer than R of them. Places
are filled one after the other for this reason, and for another: the second holder begins with the state of the first.
Where the DHT does not keep its promise, as while a partition heals, the rule for too many holders comes after it.
"""
