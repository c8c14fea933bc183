"""The emulator beside the swarm that it emulates: are they equal, and how much faster is it?"""
