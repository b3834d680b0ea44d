"""The dock of estimates for other draft lengths."""
