"""The demonstration behind `just demo`."""
