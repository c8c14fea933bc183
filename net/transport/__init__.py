"""Links between peers: the Protocols (`base`), and a module for each kind of network."""
