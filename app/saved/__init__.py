"""Persistent data: settings, unexported runs, the log, reports."""
