"""Drafters, one module each, with one small interface."""
