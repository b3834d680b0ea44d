"""Colours, icons and the pace of painting."""
