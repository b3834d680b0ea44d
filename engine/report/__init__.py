"""Reports to share: what was measured, as one HTML page or as Markdown for a comment."""
