"""Rounds of an observed server, parsed from its replies and its log, as rows of the trace."""
