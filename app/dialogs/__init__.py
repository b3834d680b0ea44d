"""Dialogs: open, export, settings, about."""
