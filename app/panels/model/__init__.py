"""The dock of the model on show: layers, memory, or the server."""
