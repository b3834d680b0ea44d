"""The docks of the window, a folder each, or a file where that is all of it: the view, and the
tables and widgets that only it uses."""
