"""What a lane of a comparison is, as the facts of its run name it."""

REFERENCE, NOISE, PEER, POLICY = "reference", "noise", "peer", "policy"
