"""Jobs, one class for each thing that the window can ask for."""
