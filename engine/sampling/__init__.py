"""Sampling: distributions, filters, the sampler."""
