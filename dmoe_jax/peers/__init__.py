"""A process's own place in a swarm: its identity, its way in, its transport."""
