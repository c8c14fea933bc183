"""Decentralised mixture-of-experts training in JAX.

The experts of a model live on other machines, are found through a DHT, learn from the gradients that trainers send
back, and may be slow or die. One object is the way in:

    async with dmoe_jax.open_swarm(join="PEERID@HOST:PORT") as swarm: ...       # with trio
    with dmoe_jax.connect("PEERID@HOST:PORT") as swarm: ...                     # without

What is promised stands in `dmoe_jax.public` and is reached from here; it is loaded when first asked for.
ARCHITECTURE.md says what each module is for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmoe_jax.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """A promised name, or their list as `__all__`."""
        # Other names with underscores are Python's questions to any package: they are no reason to load everything.
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'dmoe_jax' has no attribute {name!r}")
        import dmoe_jax.public

        if name != "__all__" and name not in dmoe_jax.public.__all__:
            raise AttributeError(f"module 'dmoe_jax' has no attribute {name!r}")
        return getattr(dmoe_jax.public, name)

    def __dir__() -> list[str]:
        """The promised names, and what Python adds."""
        import dmoe_jax.public

        return sorted({*globals(), *dmoe_jax.public.__all__})
