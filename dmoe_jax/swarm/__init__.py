"""The front door: a swarm as one object, with trio (`open_swarm`) and without (`connect`)."""
