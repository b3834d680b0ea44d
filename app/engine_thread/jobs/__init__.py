"""Jobs, one file for each thing that the window can ask for."""
