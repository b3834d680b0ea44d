"""The dock of plots over the rounds of a run."""
