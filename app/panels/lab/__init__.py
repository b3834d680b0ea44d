"""The Lab panel: what makes runs fail on purpose, and where they pause."""
