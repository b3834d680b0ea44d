"""What outlives a session: settings, unexported runs, the log, reports."""
