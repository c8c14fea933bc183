"""Decentralised mixture-of-experts training in JAX.

The experts of a model live on other machines, are found through a DHT, learn from the gradients that trainers send
back, and may be slow or die. One object is the way in:

    async with dmoe_jax.open_swarm(join="PEERID@HOST:PORT") as swarm: ...       # with trio
    with dmoe_jax.connect("PEERID@HOST:PORT") as swarm: ...                     # without

What is promised stands in `dmoe_jax.public` and in six modules, `dmoe_jax.optim` and the like, and is reached from
here; all of it is loaded when first asked for. ARCHITECTURE.md says what each module is for.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmoe_jax import data as data
    from dmoe_jax import emulator as emulator
    from dmoe_jax import experts as experts
    from dmoe_jax import models as models
    from dmoe_jax import optim as optim
    from dmoe_jax import routing as routing
    from dmoe_jax.public import *  # noqa: F403
else:
    _MODULES = ("data", "emulator", "experts", "models", "optim", "routing")
    _WITHOUT_JAX = {"read_run": "dmoe_jax.runs.tables"}

    def __getattr__(name: str) -> object:
        """A promised name or module, or their list as `__all__`."""
        if name in _MODULES:
            return importlib.import_module(f"dmoe_jax.{name}")
        if name in _WITHOUT_JAX:  # `dmoe_jax.public` loads it
            return getattr(importlib.import_module(_WITHOUT_JAX[name]), name)
        # Other names with underscores are Python's questions to any package: they are no reason to load everything.
        if name == "__all__" or not name.startswith("_"):
            import dmoe_jax.public

            if name == "__all__":
                return [*dmoe_jax.public.__all__, *_MODULES]
            if name in dmoe_jax.public.__all__:
                return getattr(dmoe_jax.public, name)
        raise AttributeError(f"module 'dmoe_jax' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """The promised names, and what Python adds."""
        return sorted({*globals(), *__getattr__("__all__")})
