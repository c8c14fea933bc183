"""Many peers, one large synchronous batch (DeDLOC): who is how far, when a step is due, and whether all have it."""
