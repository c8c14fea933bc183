"""Links between peers: the Protocols (`base`), and three networks that keep them.

`tcp` sends frames as they are and proves nothing: for one machine. `tls` encrypts them, and both ends prove who they
are; `tls_engine` does the encryption, `sockets` is what both have in common. `sim` is a whole network in one process
and in virtual time: latencies, bandwidth, losses, partitions and crashes as its caller says, the same for the same
seed.
"""
