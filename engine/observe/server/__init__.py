"""A llama-server that is asked: its client, the run that it makes, what it takes with a request."""
