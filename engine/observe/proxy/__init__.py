"""The proxy: other programs talk to a server through a port of ours, and the traffic is
recorded."""
