"""Which drafter, how long a draft, and whether at all: recorded once, simulated, confirmed."""
