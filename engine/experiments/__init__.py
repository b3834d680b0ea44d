"""Many runs at once: benchmarks, sweeps, tuning, matching, and the random models they use."""
