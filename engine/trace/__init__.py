"""The trace: append-only tables that the engine writes and everything else reads."""
