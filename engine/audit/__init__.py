"""The audit of a run: what it did is computed again, by other ways, and compared."""
