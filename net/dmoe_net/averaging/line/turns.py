"""When a member of a group that averages again and again may measure its line: while nobody averages, one at a time.

Theory of operation. A measurement fills the line of who makes it, and takes of those of the others; so it finds too
little beside an averaging, or beside another measurement, and makes both slower. All members of a group know when they
have settled an averaging, to a round trip, and about when the next one begins. The time between is cut into slots. In
the first one the member measures whose place in the group is the number of the step modulo the number of members, in
the second the next one, and so on for as many slots as there are. With each step all move up by one place, so that
everybody has a turn within as many steps as there are members, however short the time between.

Nothing is sent for that. Where two members disagree about the time, as one that was late with the average, their slots
overlap: who then is asked while it measures itself throws away what it finds (`dmoe_net.averaging.line.monitor`).
"""

CALM_S = 1.0
"""Between the end of an averaging and the first slot: the others hear a little later that it is over."""

SLOT_S = 8.0
"""Of each member: its measurement takes two or three seconds, most of it on a slow line."""

MEASURING_S = 7.0
"""Longest that a measurement takes within its slot. The rest is left for what is under way when it is given up."""


def wait_of(place: int, *, step: int, num_members: int) -> float:
    """Seconds from the end of an averaging to the slot of a member.

    Args:
      place: of the member in the group, from 0.
      step: its number, the same for all members.
      num_members: of the group.
    """
    return CALM_S + SLOT_S * ((place - step) % num_members)


def has_time(quiet_s: float) -> bool:
    """Whether there is time for a slot if nobody averages for so many seconds from now."""
    return quiet_s >= SLOT_S
