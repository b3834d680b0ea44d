"""llama-server as a source: its client, the run of its requests, the options it takes with them."""
