"""The docks of the window, each a folder, or a single file: the view, and the tables and widgets
that only it uses."""
