"""The dock of the lanes of a comparison."""
