"""The names that the package promises; each is an attribute of `dmoe_jax` itself, which loads this module when first
asked.

Not imported by any other module of the package: those import one another, and `dmoe --help` need not load JAX.
"""
