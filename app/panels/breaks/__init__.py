"""The dock of conditions at which a run pauses."""
