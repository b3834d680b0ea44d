"""Measurements: rollback policies, batch splits, forward steps, and a model to measure with."""
