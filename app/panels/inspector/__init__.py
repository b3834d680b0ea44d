"""The dock of one round in full."""
