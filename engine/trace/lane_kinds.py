"""What a lane of a comparison is, as the facts of its run name it."""

REFERENCE, NOISE, PEER, POLICY = "reference", "noise", "peer", "policy"
PEER_NOISE = "peer noise"
"""What a peer lane is judged by."""
