"""The Qt application and the command line; nothing in here computes."""
