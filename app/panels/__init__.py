"""The docks of the window, a folder each: the view, and the tables and widgets that only it
uses."""
