"""What-if: a recorded run under other drafting settings and rules."""
