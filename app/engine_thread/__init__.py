"""The engine thread: requests go in, events and the growing trace come out."""
