"""The experiments behind the papers' figures, one after the other, in one report beside the papers' numbers."""
