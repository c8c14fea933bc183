"""The speeds of a peer's line and processor: the facts by which a group shares out its work."""

from dataclasses import dataclass, fields, replace

BANDWIDTHS_BPS = (1e3, 1e11)
"""Least and most bytes a second that a peer may claim. Shares are solved for in floating point: one member that
claimed 1e-300 would spoil them for its whole group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Speeds of a peer in bytes a second, each within `BANDWIDTHS_BPS`; None: unknown.

    Raises:
      ValueError: one is out of range.
    """

    up: float | None = None
    """Sent by its line."""
    down: float | None = None
    """Received by its line."""
    reducing: float | None = None
    """Bytes of float32 vectors that it can add up. Unknown counts as more than any line brings."""

    def __post_init__(self) -> None:
        least, most = BANDWIDTHS_BPS
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not least <= value <= most:
                name = "reducing" if each.name == "reducing" else f"bandwidth {each.name}"
                raise ValueError(f"{name} is from {least:g} to {most:g} bytes a second, got {value:g}")

    def or_else(self, other: "Speeds") -> "Speeds":
        """These, and those of `other` where nothing is known."""
        unknown = {each.name: getattr(other, each.name) for each in fields(self) if getattr(self, each.name) is None}
        return replace(self, **unknown)


UNKNOWN = Speeds()
"""Nothing is known."""
