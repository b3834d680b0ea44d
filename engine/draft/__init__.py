"""Drafters: one module each behind one small interface."""
