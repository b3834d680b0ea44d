"""The dock of prompt and options of the next run."""
