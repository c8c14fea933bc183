"""Time of data-parallel training to a target loss, when peers are of unequal speed and come and go."""
