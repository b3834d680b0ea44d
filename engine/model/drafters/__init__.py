"""Drafters that read rows inside their target: their files and their mathematics."""
