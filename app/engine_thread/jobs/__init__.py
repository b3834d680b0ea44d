"""Jobs, one class for each request of the window."""
