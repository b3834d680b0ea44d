"""Loads models, decodes speculatively, records what happened.

No Qt, no printing, no global state.
"""
