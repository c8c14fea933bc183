"""The one error of the data modules."""


class DataError(ValueError):
    """A data file is missing, damaged, or not the text it is said to be. The message names it and what was expected."""
