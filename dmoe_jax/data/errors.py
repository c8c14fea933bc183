"""The one error of the data modules."""


class DataError(ValueError):
    """A file is missing, damaged or not the text it should be. The message names it and what was expected."""
