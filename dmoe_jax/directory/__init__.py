"""Records in the DHT of the experts that are served and of the swarm's members: written, read and remembered."""
