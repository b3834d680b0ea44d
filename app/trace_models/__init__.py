"""What several docks, or the engine thread, read of a trace, without widgets."""
