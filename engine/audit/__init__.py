"""The audit of a run: its results are computed again in other ways, and compared."""
