"""The dock of results of a sweep or of tune."""
