"""Comparison of lanes: several memories over one model, and their distance."""
