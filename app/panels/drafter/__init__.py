"""The dock of how good the drafter is."""
