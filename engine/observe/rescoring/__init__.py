"""Re-scoring: tokens that another engine chose, judged by this one on the same file."""
