"""How large a swarm fits into one process, and does it do the same thing twice?"""
