"""How much of a wide-area line averaging and state downloads use, in virtual time; see README.md beside this file."""
