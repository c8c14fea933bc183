"""The peers that average together in a round: the rule of the grid, and how a group assembles under it."""
