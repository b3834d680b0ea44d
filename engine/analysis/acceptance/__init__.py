"""Acceptance of drafts as counts, and the shapes in it that have a cause."""
