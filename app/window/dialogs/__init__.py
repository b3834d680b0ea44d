"""Dialogs: opening and exporting files, help, the command palette, runs not exported."""
