"""Links between peers: one set of Protocols (`base`), one module for each kind of network that implements
them."""
