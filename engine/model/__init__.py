"""Hybrid Gated-DeltaNet models and their MTP head."""
