"""What is said of a recorded trace, without torch: figures, verdict, breaks, findings, what-if."""
