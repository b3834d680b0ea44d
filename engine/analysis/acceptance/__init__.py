"""Acceptance of drafts as counts, and patterns in it that point to a cause."""
