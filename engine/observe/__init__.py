"""Other engines as sources of a trace: servers, their logs, and files of records. No torch but in
re-scoring."""
