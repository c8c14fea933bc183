"""How fast is our all-reduce beside blocking sockets that carry the same bytes?"""
