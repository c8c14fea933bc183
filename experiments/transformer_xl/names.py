"""What can be asked for on the command line. Apart from the rest, so that `--help` need not import JAX."""

from typing import Literal

Model = Literal["dmoe", "small", "base"]
"""A mixture, the dense model of its experts' size, and the dense model of its FLOPs."""

Size = Literal["tiny", "full"]
"""Minutes on two cores, or the paper's."""

Place = Literal["local", "simulated"]
"""At once on this device, or by a simulated swarm of slow trainers."""
