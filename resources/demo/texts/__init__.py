"""Text of our own for the demo models: short stories and small Python programs, without end."""
