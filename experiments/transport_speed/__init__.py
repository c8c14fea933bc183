"""How fast is our network layer beside blocking sockets?"""
