"""Final loss against bytes sent, for the ways of data-parallel training that send less."""
