"""Decentralised mixture-of-experts training in JAX.

Experts live on other machines and are found through a DHT; trainers drive a step as a few jitted segments joined by
awaited remote calls. See `README.md` for the two commands, `dmoe_jax.trainer` for the loop and `dmoe_jax.mixture` for
the same mixture twice: in one jit (`local`) and over the network (`remote`).
"""
