"""Who serves which expert, and who else is in the swarm: records in the DHT, written, read and remembered."""
