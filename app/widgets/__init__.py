"""Painted and composed widgets, independent of the engine."""
