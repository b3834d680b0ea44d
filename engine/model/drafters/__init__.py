"""Drafters that read rows inside their target: files and maths."""
