"""Experiments over many runs: benchmarks, sweeps, tuning, matching, and their random models."""
