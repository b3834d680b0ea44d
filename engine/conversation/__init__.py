"""Conversations over one session, with edited and branched turns, and recorded conversations."""
