"""The dock of one round's details."""
