"""Lanes side by side: several memories over one model, and how far they are apart."""
