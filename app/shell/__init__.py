"""The window around the views: docks, menus, the plots as a group, what can be done when."""
