"""The dock of the list of runs."""
