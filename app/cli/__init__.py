"""One module per subcommand; none of them imports Qt."""
