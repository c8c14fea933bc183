"""Models cut where the network cuts them: segments for the trainer, and the same model in one jit."""
