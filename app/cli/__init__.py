"""Subcommands, one module each; none of them imports Qt."""
