"""Conversations: turns continued, edited and branched over one session, and recorded ones."""
