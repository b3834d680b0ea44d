"""Qt item models over the trace; no widgets."""
