"""The dock of a comparison's lanes."""
