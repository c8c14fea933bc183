"""Averaging of flat vectors among peers that come and go: Moshpit All-Reduce (Ryabinin et al., NeurIPS 2021)."""
