"""Cost of a large swarm that is simulated in one process, and equality of its runs with one seed."""
