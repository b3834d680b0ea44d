"""The dock of the text, token by token."""
