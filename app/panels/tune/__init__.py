"""The Tune panel: the fastest settings and drafters by estimate, and results of sweeps."""
