"""Arrays on several devices together, of one process or of several."""

from dmoe_jax.mesh.layout import MeshShape

__all__ = ["MeshShape"]
