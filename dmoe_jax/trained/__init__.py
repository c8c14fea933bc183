"""A model that was trained: taken up from its run folder, from its nodes' checkpoints or from a living swarm, and used.

`saved_run` looks into a run folder, and `saved_model` reads its parameters.
"""
