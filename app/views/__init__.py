"""One dock per module; a view reads the trace and nothing else."""
