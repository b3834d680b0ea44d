"""The dock of failures that were recognised."""
