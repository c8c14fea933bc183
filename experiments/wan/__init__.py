"""Share of a wide-area line that averaging and state downloads use, in virtual time; see README.md beside this file."""
