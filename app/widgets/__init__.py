"""Painted and composed widgets that know nothing of the engine."""
