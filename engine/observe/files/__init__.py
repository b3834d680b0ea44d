"""Captures and files of other engines, recognised by their contents."""
