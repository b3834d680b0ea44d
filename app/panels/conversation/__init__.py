"""The dock of the turns of a conversation."""
