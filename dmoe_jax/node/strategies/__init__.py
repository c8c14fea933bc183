"""How a node runs its experts: each by programs of its own (`single`), or many of a kind by one program (`stacked`).

A small expert takes XLA less time than it takes to start a program, with its dozens of arguments. Where experts of one
kind lie stacked along a leading axis, one program carries out the batches of many of them: it takes the state of those
that were asked out of the stack, does with each what its own program would have done, and puts it back, in place.

For large experts taking the state out and putting it back costs more than is gained: their size decides, and
`NodeConfig.strategy` overrides it. What spans devices or processes, is claimed, or is the only expert of its kind in
its place, is single.

    store      where the state of one expert lies and what runs on it: the protocol, and `single`
    stack      `stacked`: the states of many experts, and what runs on them
    programs   the compiled programs of a stack, pure
    buckets    for which numbers of rows there are programs, pure
    grouping   which batches of a turn go into one program, pure
    choosing   a node's choices, made before it serves
"""
