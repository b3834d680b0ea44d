"""Models of traces without widgets, shared by several docks and the engine thread."""
