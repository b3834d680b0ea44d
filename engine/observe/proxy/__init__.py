"""Other programs talk to a server through a port of ours, and what passes is recorded."""
