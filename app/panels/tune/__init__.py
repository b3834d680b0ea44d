"""The Tune panel: which settings and drafters would have been fastest, and results of sweeps."""
