"""From bytes that a server sent, and its log, to rounds as rows of the trace."""
