"""Settings of a trained model's use. Nothing here imports JAX: `dmoe --help` reads them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Choice of the next word. Raises ValueError if a setting is out of range."""

    temperature: float = 1.0
    """Divides the log-probabilities: below 1 likely words become likelier; 0 takes the likeliest word each time."""
    top_k: int = 0
    """Only so many of the likeliest words may be drawn; 0: all."""
    top_p: float = 1.0
    """Only the likeliest words may be drawn whose probabilities together just reach this; 1: all."""
    seed: int = 0
    """Seed of the draw. A prompt's words follow from it and from the prompt's place among the prompts."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to 2**63 - 1, got {self.seed}")
