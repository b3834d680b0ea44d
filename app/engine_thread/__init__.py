"""The engine in a thread of its own: requests go in, events and the growing trace come out."""
