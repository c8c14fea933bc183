"""Exchange of what cannot be added up on the way: every member of a group gets what every other has."""
