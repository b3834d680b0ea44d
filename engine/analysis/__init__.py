"""Analysis of recorded traces: figures, verdict, breaks, findings, what-if. Does not import
torch."""
