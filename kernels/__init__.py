"""Pure functions on tensors, no model knowledge; one folder per operation."""
