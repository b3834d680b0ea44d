"""Findings: rules over the trace that name known failures, with evidence and a suggestion."""
