"""Reports to share, as one HTML page or as Markdown for a comment."""
