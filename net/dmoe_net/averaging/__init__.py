"""Averaging of flat vectors among peers that come and go: Moshpit All-Reduce (Ryabinin et al., NeurIPS 2021).

`averager` is what others use. Its parts: `grouping` finds this round's group, `reduction` or `gathering` averages in
it, `state` hands whole states to newcomers. Functions that end in `_untrusted` raise `RemoteProtocolError` for whatever
strangers should not have sent.
"""
