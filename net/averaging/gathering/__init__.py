"""How the members of a group exchange what cannot be added up on the way: everybody gets what everybody has."""
