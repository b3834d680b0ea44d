"""The trace: append-only tables that the engine writes and everybody else reads."""
