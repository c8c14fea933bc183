"""What this peer's line carries, up and down, as the peer itself finds out."""
