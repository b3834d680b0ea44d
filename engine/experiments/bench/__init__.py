"""Benchmarks: rollback policies, batch splits, forward steps, requests, and llama.cpp on the same
file."""
