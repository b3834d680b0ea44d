"""Sweeps: many runs from one plan, in sequence or on a Ray cluster, with results in one file."""
