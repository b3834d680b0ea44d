"""The dock of the model: layers, memory, or the server."""
