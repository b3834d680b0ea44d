"""How fast the window is on this machine: python -m app.bench."""
