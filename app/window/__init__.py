"""The main window: what it is made of, its dialogs, and what its commands do."""
