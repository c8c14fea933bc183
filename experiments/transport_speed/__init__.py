"""Speed of our network layer beside blocking sockets."""
